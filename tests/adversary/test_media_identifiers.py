"""A client names its picture as another client's, or counters name both alike after a restart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("vllm")

from kvcore.harness.compare import answers, assert_same_answers, settle_and_empty
from kvcore.harness.compare import small_engine as engine
from kvcore.harness.models import tiny_vision_model
from kvcore.harness.prompts import windows

pytestmark = pytest.mark.engine

IMAGE = 49153  # IMAGE_TOKEN of tiny_vision_model
NO_HASHES = {
    "skip_tokenizer_init": False,
    "enable_prefix_caching": False,
    "mm_processor_cache_gb": 0.0,
}
"""vLLM then hashes no picture: its identifier is the client's uuid, or a counter."""


@pytest.mark.exhaustive  # test_vllm_identity.py and test_vllm_features.py have pictures too
def test_a_picture_never_gets_the_kv_of_another_one(tmp_path: Path) -> None:
    eyes = tiny_vision_model()
    pictures = []
    for seed in range(3):
        pixels = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        pictures.append(tmp_path / f"{seed}.png")
        Image.fromarray(pixels).save(pictures[-1])
    text = [token for token in windows(eyes, 1, 700, 700, seed=5)[0] if token < IMAGE - 1]
    prompt = [*text[:500], IMAGE, *text[500:]]
    kvcore = {
        "host": {"capacity": "256MiB"},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "256MiB"},
    }
    names = [None, "somebody-elses"]
    with engine(eyes, kvcore, **NO_HASHES) as process:
        for uuid in names:
            attack = answers(process, [prompt], image=pictures[0], image_uuid=uuid, logprobs=True)
        settle_and_empty(process)
    kinds = {str(attack[0].logprobs)}
    with engine(eyes, kvcore, **NO_HASHES) as process:
        for uuid, image in zip(names, pictures[1:], strict=True):
            got = answers(process, [prompt], image=image, image_uuid=uuid)
            asked = {"image": image, "image_uuid": uuid, "logprobs": True}
            right = answers(process, [prompt], **asked, cache_salt="none")
            assert_same_answers(got, right)
            assert got[0].reused_tokens <= 500, "the KV of another picture"
            assert got[0].reused_tokens > 450, "the text before it is shared"
            kinds.add(str(right[0].logprobs))
        again = answers(process, [prompt], image=pictures[0])
        assert_same_answers(again, attack)
        assert again[0].reused_tokens > 600, "the same picture, whatever its name"
    assert len(kinds) == 3, "a picture changes nothing"
