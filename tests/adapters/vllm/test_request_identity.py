"""What vLLM's requests are stored under: adapters by their files, media by their content."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from kvcore.config import NamespaceConfig
from kvcore.errors import UnsupportedError
from kvcore.model.identity import Namespaces
from kvcore.model.ingredients import MediaIdentity
from kvcore_vllm import request_identity
from kvcore_vllm.request_identity import RequestIdentities
from tests.support.vllm_leader import LeaderRig
from tests.support.vllm_leader import request as leader_request

MEDIA = MediaIdentity(config={}, encoder=None)
PIXELS = torch.arange(48, dtype=torch.float32).reshape(3, 4, 4)


def item(**data: Any) -> MultiModalKwargsItem:
    field = MultiModalBatchedField()
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(data=value, field=field) for name, value in data.items()}
    )


def picture(
    data: MultiModalKwargsItem | None,
    identifier: str = "a",
    modality: str = "image",
    is_embed: torch.Tensor | None = None,
) -> MultiModalFeatureSpec:
    where = PlaceholderRange(offset=3, length=4, is_embed=is_embed)
    return MultiModalFeatureSpec(
        data=data, modality=modality, identifier=identifier, mm_position=where
    )


def request(*media: MultiModalFeatureSpec, lora: LoRARequest | None = None) -> Any:
    return SimpleNamespace(mm_features=list(media), lora_request=lora, cache_salt=None)


def identities(media: MediaIdentity | str = MEDIA) -> RequestIdentities:
    return RequestIdentities(Namespaces(NamespaceConfig(), b"model"), media)


# -- media ---------------------------------------------------------------------------------------


def test_a_picture_is_known_by_its_content_under_any_identifier() -> None:
    """A client's uuid, vLLM's counter and vLLM's hash: in this engine and in another one."""
    names = ("uuid of a client", "renderer0-mm-1-image-0", "ab" * 32)
    found = {
        identities().of(request(picture(item(pixel_values=PIXELS.clone()), name))).extras
        for name in names
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    "other",
    [
        picture(item(pixel_values=PIXELS + 1)),
        picture(item(pixel_values=PIXELS.reshape(4, 4, 3))),
        picture(item(pixel_values=PIXELS.to(torch.float64))),
        picture(item(pixels=PIXELS)),
        picture(item(pixel_values=[PIXELS, PIXELS])),
        picture(item(pixel_values=PIXELS, grid=torch.tensor([1, 2, 2]))),
        picture(item(pixel_values=PIXELS, crops=2)),
        picture(item(pixel_values=PIXELS), modality="video"),
        picture(item(pixel_values=PIXELS), is_embed=torch.tensor([True, False, True, True])),
    ],
)
def test_another_content_is_another_medium(other: MultiModalFeatureSpec) -> None:
    """The processor's arguments, version and configuration are in the tensors that it makes."""
    one = identities().of(request(picture(item(pixel_values=PIXELS))))
    assert identities().of(request(other)).extras != one.extras


def test_the_encoder_counts_for_media_only() -> None:
    other = identities(MediaIdentity(config={}, encoder="fp8"))
    seen = request(picture(item(pixel_values=PIXELS)))
    assert other.of(seen).extras != identities().of(seen).extras
    assert other.of(request()) == identities().of(request())


def test_half_precision_has_bytes() -> None:
    halves = picture(item(pixel_values=PIXELS.to(torch.bfloat16)))
    assert identities().of(request(halves)).extras


@pytest.mark.parametrize(
    "data",
    [
        None,
        item(pixel_values=None),
        item(image_grid_thw=torch.tensor([[1, 2, 2]]), seconds=torch.tensor([0.5])),  # sizes alone
        item(mask=torch.ones(2, 2, dtype=torch.bool)),
        item(address=4096, monotonic_id=7, signature=[1, 2]),  # of the cache in shared memory
    ],
)
def test_a_medium_without_its_tensors_is_left_alone(data: MultiModalKwargsItem | None) -> None:
    with pytest.raises(UnsupportedError, match="mm_processor_cache_type"):
        identities().of(request(picture(data)))


def test_media_that_cannot_be_told_apart_are_left_alone() -> None:
    embeddings = identities("embeddings of another engine")
    with pytest.raises(UnsupportedError, match="another engine"):
        embeddings.of(request(picture(item(pixel_values=PIXELS))))
    assert embeddings.of(request()).extras == ()


def test_an_identifier_with_two_contents_is_not_trusted_any_more() -> None:
    """vLLM keeps what its encoder made by identifier: the second content may get the first's."""
    known = identities()
    first = request(picture(item(pixel_values=PIXELS), "u"))
    known.of(first)
    second = request(picture(item(pixel_values=PIXELS + 1), "u"))
    for again in (second, first, second):
        with pytest.raises(UnsupportedError, match="two contents"):
            known.of(again)
    assert known.of(request(picture(item(pixel_values=PIXELS + 1), "v"))).extras


def test_media_without_end_take_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_identity, "KEPT", 3)
    known = identities()
    for number in range(9):
        known.of(request(picture(item(pixel_values=PIXELS + number), str(number))))
    assert len(known._contents) == 3
    assert len(known._digests) <= 3


# -- LoRA ----------------------------------------------------------------------------------------


def adapter(folder: Path, content: bytes = b"1", config: str = '{"r": 8}') -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.bin").write_bytes(content)
    return str(folder)


def test_an_adapter_that_changed_under_a_running_engine_is_left_alone(tmp_path: Path) -> None:
    """vLLM reads it when it likes. Only a reload in place says that it has read it again."""
    path, known = adapter(tmp_path / "a"), identities()
    old = LoRARequest("a", 1, path)
    before = known.of(request(lora=old)).namespace
    assert known.unchanged(request(lora=old), before)
    adapter(tmp_path / "a", config='{"r": 8, "lora_alpha": 64}')
    assert not known.unchanged(request(lora=old), before), "its KV is saved no more"
    with pytest.raises(UnsupportedError, match="changed while vLLM may use the old ones"):
        known.of(request(lora=old))
    again = LoRARequest("a", 1, path, load_inplace=True)
    assert known.of(request(lora=again)).namespace.digest != before.digest
    assert known.of(request(lora=LoRARequest("a", 2, path))).namespace.digest != before.digest


def test_an_adapter_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path, known = adapter(tmp_path / "a"), identities()
    lora = LoRARequest("a", 1, path)
    before = known.of(request(lora=lora)).namespace
    (tmp_path / "a" / "adapter_model.bin").unlink()
    assert not known.unchanged(request(lora=lora), before)
    with pytest.raises(UnsupportedError, match="no model weights"):
        known.of(request(lora=lora))


@pytest.mark.parametrize("what", ["adapter", "medium"])
def test_the_scheduler_leaves_such_a_request_alone(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = LeaderRig()
    assert rig.ask("plain") != (0, False)
    for name in ("one", "two"):
        given = rig.requests[name] = leader_request(name)
        if what == "adapter":
            given.lora_request = LoRARequest("a", 1, str(tmp_path / "half"))
        else:
            given.mm_features = [picture(item(pixel_values=PIXELS))]
        assert rig.ask(name) == (0, False)
    lines = [line for line in caplog.messages if "answered without kvcore" in line]
    assert len(lines) == 1
