"""What vLLM's requests are stored under: adapters by their files, media by their content."""

from __future__ import annotations

import threading
import time
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
from kvcore.model.adapter_files import AdapterFiles
from kvcore.model.identity import Namespaces
from kvcore.model.ingredients import MediaIdentity
from kvcore.model.keys import Namespace
from kvcore.telemetry.metrics import MissReason
from kvcore.testing.waiting import PATIENCE_S, until
from kvcore_vllm import request_identity
from kvcore_vllm.request_identity import RequestIdentities, RequestIdentity
from tests.support.vllm_leader import PAGES, LeaderRig
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
    return SimpleNamespace(
        request_id="r", mm_features=list(media), lora_request=lora, cache_salt=None
    )


class Identities(RequestIdentities):
    """Identities that wait until the files of adapters have been looked at."""

    def of(self, request: Any) -> RequestIdentity:
        while (found := super().of(request)) is None:
            time.sleep(0.01)
        return found

    def unchanged(self, request: Any, namespace: Namespace) -> bool:
        while (found := super().unchanged(request, namespace)) is None:
            time.sleep(0.01)
        return found


def identities(media: MediaIdentity | str = MEDIA) -> Identities:
    return Identities(Namespaces(NamespaceConfig(), b"model"), media, wait_s=30.0)


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
        assert until(lambda name=name: (got := rig.ask(name)) != (None, False) and got) == (
            0,
            False,
        )
        assert misses(rig) == {}, "it counts when it is scheduled"
        rig.side.update_state_after_alloc(given, PAGES, 0)
        rig.side.update_state_after_alloc(given, PAGES, 0)
        assert misses(rig) == {"unsupported": 1}
        rig.side.request_finished(given, ())
    lines = [line for line in caplog.messages if "answered without kvcore" in line]
    assert len(lines) == 1


def misses(rig: LeaderRig) -> dict[str, int]:
    """Return the misses by reason since the last call."""
    return dict(rig.side.take_stats().get("kvcore_misses_total", {}))


class Hanging:
    """Adapters on a disk that hangs until `answer` is called."""

    def __init__(self, rig: LeaderRig, answer: str = "a:1") -> None:
        self.identity = answer
        self._answers = threading.Event()
        rig.side._requests._identities._files = AdapterFiles(self._look)

    def _look(self, name: str, path: str) -> str:
        assert self._answers.wait(PATIENCE_S)
        return self.identity

    def answer(self) -> None:
        self._answers.set()


def with_adapter(rig: LeaderRig, name: str) -> Any:
    asked = rig.requests[name] = leader_request(name)
    asked.lora_request = LoRARequest("a", 1, "/mnt/adapters/a")
    return asked


def test_an_adapter_on_a_disk_that_hangs_holds_up_no_other_request() -> None:
    """The scheduler goes on. The request waits, as it does for a lookup, and is then served."""
    rig = LeaderRig()
    disk = Hanging(rig)
    with_adapter(rig, "a")
    for _ in range(3):
        assert rig.ask("a") == (None, False)
        assert rig.ask("plain") == (400, True)
    disk.answer()
    assert until(lambda: (got := rig.ask("a")) != (None, False) and got) == (0, False)
    rig.side.update_state_after_alloc(rig.requests["a"], PAGES, 0)
    assert misses(rig) == {"not_cached": 1}


def test_an_adapter_that_is_not_read_in_time_is_computed_without_kvcore(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = LeaderRig(settings={"transfer": {"load_deadline_s": 0.05}})
    disk = Hanging(rig)
    asked = with_adapter(rig, "a")
    assert until(lambda: (got := rig.ask("a")) != (None, False) and got) == (0, False)
    disk.answer()
    assert rig.ask("a") == (0, False), "its answer does not change"
    rig.side.update_state_after_alloc(asked, PAGES, 0)
    assert misses(rig) == {MissReason.UNAVAILABLE.value: 1}
    assert "are not read in time" in caplog.text
    rig.side.request_finished(asked, ())
    assert not rig.side._requests._unserved
    assert not rig.side._requests._identities._looks


def test_a_request_that_ends_while_its_adapter_is_read_leaves_nothing() -> None:
    rig = LeaderRig()
    disk = Hanging(rig)
    asked = with_adapter(rig, "a")
    assert rig.ask("a") == (None, False)
    rig.side.request_finished(asked, ())
    assert not rig.side._requests._identities._looks
    disk.answer()


@pytest.mark.parametrize("found", ["a:1", "a:2"], ids=["the same", "changed"])
def test_a_save_waits_until_the_adapter_was_looked_at_again(found: str) -> None:
    """Its blocks are saved in a later step, or never if the files are others by then."""
    rig = LeaderRig()
    Hanging(rig).answer()
    with_adapter(rig, "a")
    until(lambda: rig.ask("a") != (None, False))
    disk = Hanging(rig, found)
    tracked, saved = rig.side._requests["a"], []

    def save(blocks: int) -> None:
        rig.side._saves._blocks(tracked, blocks, PAGES.get_block_ids(), saved.append)

    save(2)
    assert (saved, tracked.saved_blocks, tracked.may_save) == ([], 0, True)
    disk.answer()
    until(lambda: save(3) or saved or not tracked.may_save)
    assert (tracked.saved_blocks, tracked.may_save) == ((3, True) if found == "a:1" else (0, False))
