"""Real SGLang engines that differ in one thing, over one disk folder: none finds another's KV."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcore.harness.compare import (
    answers,
    assert_all_from,
    assert_same_answers,
    settle_and_empty,
    sglang_tiers,
    small_engine,
)
from kvcore.harness.engine_process import run_program
from kvcore.harness.prompts import windows

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

engine = partial(small_engine, engine="sglang")
BLOCK = 16
SESSION = Path(__file__).with_name("sglang_updates.py")


def edited(model: Path, folder: Path) -> Path:
    """Return a copy of a model in which a few numbers of one tensor are others."""
    import torch
    from safetensors.torch import load_file, save_file

    copy = folder / "edited"
    shutil.copytree(model, copy)
    path = copy / "model.safetensors"
    tensors = load_file(path)
    with torch.no_grad():
        tensors["model.layers.1.self_attn.v_proj.weight"][:2] *= -1
    save_file(tensors, path, metadata={"format": "pt"})
    return copy


THETA = json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}})

Change = Callable[[Path, Path], tuple[Path, dict[str, Any]]]
CHANGES: dict[str, Change] = {
    "weights": lambda model, folder: (edited(model, folder), {}),
    "load": lambda model, folder: (model, {"load_format": "dummy"}),
    "config": lambda model, folder: (model, {"json_model_override_args": THETA}),
}


@pytest.mark.parametrize(
    "changes", [("weights", "load"), pytest.param(("config",), marks=pytest.mark.exhaustive)]
)
def test_engines_that_differ_in_one_thing_find_nothing(
    model: Path, tmp_path: Path, changes: tuple[str, ...]
) -> None:
    """And what they store is not found by the first when it comes back."""
    kvcore = sglang_tiers(tmp_path)
    prompts = windows(model, 4, 200, 600, seed=21)
    with engine(model, kvcore) as process:
        first = answers(process, prompts)
        settle_and_empty(process)
    for name in changes:
        other, args = CHANGES[name](model, tmp_path)
        with engine(other, None, disable_radix_cache=True, **args) as process:
            expected = answers(process, prompts)
        assert [a.token_ids for a in expected] != [a.token_ids for a in first], name
        with engine(other, kvcore, **args) as process:
            got = answers(process, prompts)
            assert_same_answers(got, expected)
            assert [answer.reused_tokens for answer in got] == [0] * len(prompts), name
            settle_and_empty(process)
            again = answers(process, prompts)
            assert_same_answers(again, expected)
            assert all(answer.reused_tokens for answer in again), name
            alone = "KV of this engine is not shared" in process.log.read_text()
            assert alone == (name == "load")
    with engine(model, kvcore) as process:
        got = answers(process, prompts)
        assert_same_answers(got, first)
        assert_all_from("disk", got, [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts])


@pytest.mark.exhaustive
def test_weights_that_are_updated_in_place_find_nothing_of_before(
    model: Path, tmp_path: Path
) -> None:
    """With `keep_on_flush` the update's own flush does not clear kvcore's tiers. What is stored
    under the new weights is found again, but not by an engine that has the files' weights."""
    other, kvcore = edited(model, tmp_path), sglang_tiers(tmp_path)
    prompts = windows(model, 3, 200, 500, seed=22)
    with engine(other, None, disable_radix_cache=True) as process:
        expected = [answer.token_ids for answer in answers(process, prompts)]
    arguments = [model, other, json.dumps(kvcore), json.dumps(prompts)]
    said = run_program("sglang", model, SESSION, *arguments, timeout_s=300)
    [line] = [line for line in said.splitlines() if line.startswith('{"answers"')]
    before, cold, warm = json.loads(line)["answers"]
    assert [answer["token_ids"] for answer in before] != expected
    assert [answer["token_ids"] for answer in cold] == expected
    assert not any(answer["kvcore"]["reused_tokens"] for answer in cold)
    assert [answer["token_ids"] for answer in warm] == expected
    assert all(answer["kvcore"]["reused_tokens"] for answer in warm)
    with engine(model, kvcore) as process:
        again = answers(process, prompts)
        assert [a.token_ids for a in again] == [answer["token_ids"] for answer in before]
        assert all(answer.tiers.get("disk") for answer in again)


COUNTED = """
    c128_page_size custom_weight_loader debug_tensor_dump_input_file deepep_config
    deepep_dispatcher_output_dtype deepep_mode deepep_v2_mode
    disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion dllm_algorithm
    dllm_algorithm_config dllm_fdfo dsa_decode_backend dsa_paged_mqa_logits_backend
    dsa_prefill_backend dsa_topk_backend dsa_triton_union dsv4_attn_backend dsv4_prefill_backend
    dwdp_size enable_amd_monokernel enable_decoder_swa_bounded_replay
    enable_deepseek_v4_fp4_indexer enable_deterministic_inference enable_dsa_fused_indexer
    enable_encoder_swa_bounded_replay enable_fused_qk_norm_rope enable_hisparse
    enable_int8_mamba_checkpoint enable_linear_replayssm enable_linear_replayssm_spec
    enable_mamba_cache_stochastic_rounding enable_megamoe_for_layernorm_sp enable_mis
    enable_nvidia_megakernel enable_precise_embedding_interpolation enable_quant_communications
    enable_scattered_sconv enable_tf32_matmul enable_w4a4_mxfp4_megamoe enable_waterfill
    enforce_shared_experts_fusion ep_dispatch_algorithm flashinfer_a2a_dispatch_type
    flashinfer_mla_disable_ragged flashinfer_mxfp4_moe_precision fp4_gemm_runner_backend
    fp8_gemm_runner_backend fuseep_mode hisparse_config int8_mamba_ckpt_size is_embedding
    kt_cpuinfer kt_max_deferred_experts_per_token kt_method kt_num_gpu_experts
    kt_threadpool_count kt_weight_path language_model_only language_only linear_attn_backend
    linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
    linear_replayssm_cache_len mamba_backend mamba_cache_philox_rounds mamba_full_memory_ratio
    mamba_max_states_per_path mamba_radix_cache_strategy mamba_ssm_dtype mamba_track_interval
    model_config_parser model_impl model_loader_extra_config modelopt_checkpoint_restore_path
    modelopt_quant moe_a2a_backend moe_runner_backend msprobe_dump_config
    prefill_kv_cache_dequant_dtype qsa_indexer_dtype quantization_param_path quantize_and_serve
    rl_on_policy_target rl_quant_profile triton_attention_reduce_in_fp32 uses_mamba_radix_cache
"""
"""The arguments of SGLang 0.5.23 that count where they are not at their defaults."""


def test_every_argument_of_this_sglang_was_looked_at() -> None:
    """One that is new counts, until it is found neutral and named in kvcore_sglang.arguments."""
    import msgspec

    from kvcore_sglang.arguments import counted
    from kvcore_sglang.testing.standins import install

    install()
    from sglang.srt.server_args import ServerArgs

    names = [field.name for field in msgspec.structs.fields(ServerArgs)]
    assert counted(names) == COUNTED.split()
