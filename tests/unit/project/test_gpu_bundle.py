"""`make gpu-bundle`: what is packed, cut and laid into folders arrives on another machine whole."""

from __future__ import annotations

import random
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement

from support.budget import examples
from tools.gpu import bundle, commands, unpack
from tools.gpu.packing import RESERVE, Member, cut, lay, write_archive, write_folders

ENGINE = "vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"


def wheel(
    folder: Path, name: str, files: Mapping[str, bytes] = {}, needs: list[str] | None = None
) -> Path:
    """Write a wheel with these files and requirements."""
    distribution = "-".join(name.split("-")[:2])
    told = "".join(f"Requires-Dist: {need}\n" for need in needs or ())
    with zipfile.ZipFile(folder / name, "w") as file:
        file.writestr(f"{distribution}.dist-info/METADATA", f"Metadata-Version: 2.1\n{told}")
        for path, content in files.items():
            file.writestr(path, content)
    return folder / name


def packed(out: Path, archives: Mapping[str, int], limit: int) -> list[str]:
    """Pack archives of one file of so many random bytes each; return the folders' names."""
    made = {}
    for name, size in archives.items():
        path = out / f"{name}.tar.xz"
        write_archive(path, [Member(f"site/{name}/data", random.Random(name).randbytes(size))])
        made[path.name] = cut(path, limit - RESERVE)
    return [folder.name for folder in write_folders(out, made, limit, {"vllm": "0.32.0"})]


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


SIZES = st.dictionaries(
    st.sampled_from(["packages", "vllm", "kernels", "model"]), st.integers(0, 30_000), min_size=1
)


@given(sizes=SIZES, room=st.integers(4_000, 40_000), data=st.data())
@settings(max_examples=examples(30, 1))
def test_folders_in_any_order_give_back_every_file(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: dict[str, int],
    room: int,
    data: st.DataObject,
) -> None:
    """In one call or in several, and also if a folder comes twice."""
    out, target = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("target")
    limit = RESERVE + room
    names = packed(out, sizes, limit)
    for name in names:
        assert sum(path.stat().st_size for path in (out / name).iterdir()) <= limit
    order = data.draw(st.permutations(names))
    order += data.draw(st.lists(st.sampled_from(names), max_size=2))
    while order:
        count = data.draw(st.integers(1, len(order)))
        assert unpack.main([*(str(out / name) for name in order[:count]), str(target)]) == 0
        order = order[count:]
    want = {f"{name}/data": random.Random(name).randbytes(size) for name, size in sizes.items()}
    assert tree(target / "site") == want
    assert not [path for path in (target / "parts").iterdir() if path.suffix != ".done"]


@pytest.mark.parametrize("harm", ["flip", "shorten", "remove"])
def test_a_damaged_folder_is_refused_and_nothing_is_unpacked(
    tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [first, *others] = packed(tmp_path, {"vllm": 30_000, "model": 100}, RESERVE + 10_000)
    part = next(path for path in (tmp_path / first).iterdir() if ".tar.xz" in path.name)
    content = bytearray(part.read_bytes())
    if harm == "remove":
        part.unlink()
    elif harm == "shorten":
        part.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    folders = [str(tmp_path / name) for name in (*others, first)]
    assert unpack.main([*folders, str(tmp_path / "target")]) == 1
    assert part.name in capsys.readouterr().err
    assert not (tmp_path / "target").exists()


def test_the_script_runs_with_nothing_but_python(tmp_path: Path) -> None:
    [name] = packed(tmp_path, {"vllm": 100}, RESERVE + 10_000)
    script = tmp_path / name / "unpack.py"
    command = [sys.executable, "-I", "-S", str(script), str(script.parent), str(tmp_path / "to")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "vllm.tar.xz: unpacked\n"
    assert subprocess.run([*command[:4]], capture_output=True, check=False).returncode == 2


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(100, 300))
def test_files_are_laid_in_order_and_no_folder_is_too_large(sizes: list[int], limit: int) -> None:
    named = [(str(number), size) for number, size in enumerate(sizes)]
    groups = lay(named, limit)
    assert [name for group in groups for name in group] == [name for name, _ in named]
    totals = [sum(sizes[int(name)] for name in group) for group in groups]
    assert all(total <= limit for total in totals)
    for total, after in zip(totals[:-1], groups[1:], strict=True):
        assert total + sizes[int(after[0])] > limit


def test_a_file_that_fits_no_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="cut it first"):
        lay([("vllm", 11)], 10)


def test_a_manifest_that_would_make_folders_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar.xz").write_bytes(b"1")
    notes = {"left_out": ["x" * RESERVE]}
    with pytest.raises(ValueError, match="more than is reserved"):
        write_folders(tmp_path, {"a.tar.xz": [tmp_path / "a.tar.xz"]}, RESERVE + 9, notes)


def test_equal_files_give_equal_archives(tmp_path: Path) -> None:
    members = [Member("b", b"2"), Member("a", b"1")]
    for name, order in (("x", members), ("y", members[::-1])):
        write_archive(tmp_path / name, order)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


# -- wheels ---------------------------------------------------------------------------------


def test_a_wheel_is_laid_out_as_by_an_installer(tmp_path: Path) -> None:
    files = {
        "pkg/__init__.py": b"1",
        "pkg-1.data/purelib/other/a.py": b"2",
        "pkg-1.data/scripts/tool": b"3",
        "pkg-1.data/headers/a.h": b"4",
    }
    made = wheel(tmp_path, "pkg-1-py3-none-any.whl", files)
    assert {m.name: m.content for m in bundle.wheel_members(made) if "METADATA" not in m.name} == {
        "site/pkg/__init__.py": b"1",
        "site/other/a.py": b"2",
    }


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    files = {
        "vllm/__init__.py": b"",
        "vllm/vllm-rs": b"rust",
        "vllm/_C_stable_libtorch.abi3.so": b"operators",
        "vllm/_moe_C_stable_libtorch.abi3.so": b"experts",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": b"large",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": b"attention",
        "vllm/third_party/deep_gemm/include/a.h": b"header",
    }
    return wheel(tmp_path, ENGINE, files, ["pydantic>=2", "mistral-common; extra == 'audio'"])


@pytest.mark.parametrize("experts", [False, True])
def test_every_file_of_vllm_is_in_one_piece_or_named_as_left_out(
    engine: Path, experts: bool
) -> None:
    made = {p.name: [m.name for m in p.members] for p in bundle.pieces(engine, [], experts, None)}
    assert made["vllm-attention"] == ["site/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"]
    assert made["vllm-kernels"] == ["site/vllm/_C_stable_libtorch.abi3.so"]
    assert ("vllm-experts" in made) is experts
    names = [name.removeprefix("site/") for piece in made.values() for name in piece]
    with zipfile.ZipFile(engine) as file:
        assert sorted(names + bundle.left_out(engine, experts)) == sorted(file.namelist())


def test_a_release_built_in_another_way_is_refused(tmp_path: Path) -> None:
    made = wheel(tmp_path, ENGINE, {"vllm/_C.abi3.so": b""})
    with pytest.raises(bundle.BundleError, match="built in another way"):
        list(bundle.chosen_members(made, bundle.KERNELS))


def test_versions_are_those_that_the_others_require(
    tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest pydantic-core is not the one that pydantic was built for."""
    wheel(tmp_path, "pydantic-2.9.0-py3-none-any.whl", needs=["pydantic-core==2.23.0"])
    for version in ("2.23.0", "2.24.0"):
        wheel(tmp_path, f"pydantic_core-{version}-cp312-cp312-manylinux_2_17_x86_64.whl")
    monkeypatch.setattr(bundle, "WHEELS", ("pydantic", "pydantic-core"))
    monkeypatch.setattr(bundle, "_download", lambda cache, need: None)
    found = bundle.resolved(tmp_path, engine)
    assert found["pydantic-core"].name.startswith("pydantic_core-2.23.0-")


def test_a_package_that_nobody_has_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "_download", lambda cache, need: None)
    with pytest.raises(bundle.BundleError, match=r"no wheel of nothing>=2 for Python 3\.12"):
        bundle.one_wheel(tmp_path, Requirement("nothing>=2"))


def test_what_is_required_and_not_there_is_listed(tmp_path: Path) -> None:
    needs = ["torch>=2", "msgspec", "gone>=1", "absent; sys_platform == 'win32'"]
    made = wheel(tmp_path, "pkg-1-py3-none-any.whl", needs=needs)
    assert bundle.unmet([made]) == {"gone": ["pkg"]}


def test_kvcore_s_own_requirements_are_packed_or_there() -> None:
    needs = [Requirement(text) for text in bundle.project()["dependencies"]]
    wanted = {n.name for n in needs if n.marker is None or n.marker.evaluate(bundle.MARKERS)}
    assert wanted <= {*bundle.WHEELS, *bundle.THERE}
    assert not set(bundle.WHEELS) & set(bundle.THERE)


# -- commands -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_folder_is_carried_once_and_all_before_what_needs_them(count: int) -> None:
    folders = [str(number) for number in range(1, count + 1)]
    written = commands.markdown(Path("results/gpu-bundle"), folders)
    calls = written.split("\n## ")[1:]
    carried = [name for call in calls for name in folders if f"gpu-bundle/{name}`" in call]
    assert carried == folders
    last = next(i for i, call in enumerate(calls) if "--parts vllm" in call)
    assert not any("carry `" in call for call in calls[last + 1 :])
    assert "carry `results/gpu-bundle/1`" in calls[0]
    for call in calls:
        assert len(call.split("```")[1]) < 2000
