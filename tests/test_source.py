"""Reading parameters and includes out of CUDA source text."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from cupaged import source as source_module
from cupaged.errors import KernelSourceError
from cupaged.source import (
    KernelSource,
    Parameter,
    include_closure,
    kernels_dir,
    parse_parameters,
    read_parameters,
)


def parse(parameters: str, before: str = "") -> tuple[Parameter, ...]:
    return parse_parameters(
        f'extern "C" __global__ void {before} entry({parameters}) {{ body(1, 2); }}', "entry"
    )


SCALARS = {
    "u32": ["u32", "unsigned", "unsigned int", "uint32_t", "const u32", "unsigned  int", "u32 const"],
    "i32": ["i32", "int", "int32_t", "const int"],
    "u64": ["u64", "unsigned long long", "uint64_t", "const unsigned long long"],
    "i64": ["i64", "long long", "int64_t"],
    "f32": ["float", "const float", "__grid_constant__ const float"],
}


@pytest.mark.parametrize(("kind", "spelling"), [(k, s) for k, names in SCALARS.items() for s in names])
def test_scalar_kinds(kind: str, spelling: str) -> None:
    assert parse(f"{spelling} n") == (Parameter("n", kind),)


POINTERS = {
    "float* x": False,
    "float *x": False,
    "float * __restrict__ x": False,
    "float* __restrict__ const x": False,
    "float* const x": False,
    "const float* x": True,
    "float const* x": True,
    "const float* __restrict__ x": True,
    "const float* const x": True,
    "const float** x": False,
    "float* const* x": True,
    "void* x": False,
    "const MyStruct<int>* x": True,
    "const unsigned char *__restrict__ x": True,
}


@pytest.mark.parametrize(("declaration", "const"), POINTERS.items())
def test_pointers_and_what_the_kernel_may_write(declaration: str, const: bool) -> None:
    assert parse(declaration) == (Parameter("x", "ptr", const),)


def test_order_names_and_kinds_over_many_lines() -> None:
    found = parse("u32 a,\n   const u8* b,\n\tu64\n c, float d")
    assert [(p.name, p.kind) for p in found] == [("a", "u32"), ("b", "ptr"), ("c", "u64"), ("d", "f32")]


def test_no_parameters() -> None:
    assert parse("") == ()
    assert parse("  \n ") == ()


def test_comments_are_not_read() -> None:
    text = """
    // extern "C" __global__ void entry(u32 commented_out) {}
    /* extern "C" __global__ void entry(float also,
       float commented_out) {} */
    extern "C" /* here */ __global__ void  // and here
        entry(u32 a,  // elements, float b,
              /* was: float c, */ u64 d) {}
    """
    assert [p.name for p in parse_parameters(text, "entry")] == ["a", "d"]


@pytest.mark.parametrize(
    "before",
    [
        "__launch_bounds__(256)",
        "__launch_bounds__(256, 2)",
        "__launch_bounds__ ( 32 * 4 )\n   ",
        "__launch_bounds__(threads(4), 1)",
        "__launch_bounds__(Shape<(4)>::threads(), blocks())",
    ],
)
def test_launch_bounds(before: str) -> None:
    assert parse("u32 n", before) == (Parameter("n", "u32"),)


def test_launch_bounds_before_void() -> None:
    text = 'extern "C" __global__ __launch_bounds__(32 * 4) void entry(u32 n) {}'
    assert parse_parameters(text, "entry") == (Parameter("n", "u32"),)


BLOCK = """
    namespace outside { __global__ void entry(u64 mangled) {} }
    extern "C" {
    static const char* words = "} \\" }";  // a brace that closes nothing: }
    __device__ int helper(char c) { if (c == '}' || c == '\\'') { return 1; } return 1'000; }
    __global__ void __launch_bounds__(256) entry(u32 a,
                                                 float b) { helper('{'); }
    __global__ void second(i64 c) {}
    }
    __global__ void after(u32 d) {}
    extern "C" { __global__ void third() {} }
"""


def test_blocks_of_c_linkage() -> None:
    found = parse_parameters(BLOCK, "entry")
    assert [(p.name, p.kind) for p in found] == [("a", "u32"), ("b", "f32")]
    assert [p.name for p in parse_parameters(BLOCK, "second")] == ["c"]
    assert parse_parameters(BLOCK, "third") == ()


@pytest.mark.parametrize("entry", ["after", "outside"])
def test_functions_outside_blocks_of_c_linkage_are_no_entries(entry: str) -> None:
    with pytest.raises(KernelSourceError, match=f"no entry .* {entry}"):
        parse_parameters(BLOCK, entry)


def test_the_entry_is_found_by_its_whole_name() -> None:
    text = 'extern "C" __global__ void entry_two(u32 a) {}\nextern "C" __global__ void entry(float b) {}\n'
    assert parse_parameters(text, "entry") == (Parameter("b", "f32"),)
    assert parse_parameters(text, "entry_two") == (Parameter("a", "u32"),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "__global__ void entry(u32 a) {}",
        'extern "C" void entry(u32 a) {}',
        'extern "C" __global__ void other(u32 entry) {}',
        '// extern "C" __global__ void entry(u32 a) {}',
        "template <int N> __global__ void entry(u32 a) {}",
    ],
)
def test_a_missing_entry_is_named(text: str) -> None:
    with pytest.raises(KernelSourceError, match=r'no entry extern "C" __global__ void entry\(\.\.\.\)'):
        parse_parameters(text, "entry")


@pytest.mark.parametrize(
    ("declaration", "name", "spelling"),
    [
        ("double x", "x", "double"),
        ("unsigned char x", "x", "unsigned char"),
        ("size_t n", "n", "size_t"),
        ("const Shape& shape", "shape", "Shape &"),
        ("__half h", "h", "__half"),
        ("bool b", "b", "bool"),
        ("long n", "n", "long"),
    ],
)
def test_unsupported_types_name_parameter_type_and_what_is_allowed(
    declaration: str, name: str, spelling: str
) -> None:
    with pytest.raises(KernelSourceError, match=r"entry: parameter .* has type .*allowed") as caught:
        parse(f"u32 a, {declaration}")
    message = str(caught.value)
    assert repr(name) in message
    assert "".join(spelling.split()) in "".join(message.split())
    assert "float" in message


@pytest.mark.parametrize("declaration", ["float x[4]", "u32"])
def test_unreadable_parameters(declaration: str) -> None:
    with pytest.raises(KernelSourceError, match="entry: "):
        parse(declaration)


def test_read_parameters_names_the_file_and_follows_its_changes(tmp_path: Path) -> None:
    path = tmp_path / "own.cu"
    path.write_text('extern "C" __global__ void entry(u32 a) {}')
    assert read_parameters(path, "entry", 1) == (Parameter("a", "u32"),)
    path.write_text('extern "C" __global__ void entry(float a) {}')
    assert read_parameters(path, "entry", 2) == (Parameter("a", "f32"),)
    with pytest.raises(KernelSourceError, match=r"own\.cu: no entry .*void missing"):
        read_parameters(path, "missing", 2)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """main.cu -> sub/one.cuh -> sub/two.cuh -> ../three.cuh -> sub/one.cuh, and files not included."""
    (tmp_path / "sub").mkdir()
    files = {
        "main.cu": '#include "sub/one.cuh"\n#include <cuda_runtime.h>\n#include "not_there.h"\nint main_;\n',
        "sub/one.cuh": '#pragma once\n  #  include "two.cuh"\n',
        "sub/two.cuh": '#include "three.cuh"\n// #include "unrelated.cuh"\n',
        "three.cuh": '#include "sub/one.cuh"\nint three;\n',
        "unrelated.cuh": "int unrelated;\n",
        "cuda_runtime.h": "int found_by_accident;\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def source_in(folder: Path) -> KernelSource:
    return KernelSource(folder / "main.cu", "entry", ())


def test_include_closure(tree: Path) -> None:
    found = include_closure(tree / "main.cu", (tree,))
    assert [str(p.relative_to(tree)) for p in found] == [
        "main.cu",
        "sub/one.cuh",
        "sub/two.cuh",
        "three.cuh",
    ]


def test_a_folder_given_first_wins(tree: Path, tmp_path: Path) -> None:
    other = tree / "other"
    other.mkdir()
    (other / "three.cuh").write_text("int other_three;\n")
    assert include_closure(tree / "main.cu", (tree, other))[-1] == tree / "three.cuh"
    assert include_closure(tree / "main.cu", (other, tree))[-1] == other / "three.cuh"


@pytest.mark.parametrize("name", ["main.cu", "sub/one.cuh", "sub/two.cuh", "three.cuh"])
def test_the_digest_follows_every_file_included(tree: Path, name: str) -> None:
    before = source_in(tree).digest()
    assert source_in(tree).digest() == before
    path = tree / name
    path.write_text(path.read_text() + "\n")
    assert source_in(tree).digest() != before


def test_the_digest_does_not_follow_other_files_times_or_places(tree: Path, tmp_path: Path) -> None:
    before = source_in(tree).digest()
    for name in ("unrelated.cuh", "cuda_runtime.h"):
        (tree / name).write_text("int changed;\n")
    os.utime(tree / "three.cuh", (1, 1))
    assert source_in(tree).digest() == before
    moved = tmp_path / "elsewhere"
    shutil.copytree(tree, moved, ignore=shutil.ignore_patterns("elsewhere"))
    assert source_in(moved).digest() == before


def test_the_digest_tells_a_line_that_moves_from_one_file_into_the_next(tree: Path) -> None:
    """All bytes, one file after another, stay the same."""
    one, two = tree / "sub/one.cuh", tree / "sub/two.cuh"
    one.write_text('#include "two.cuh"\nint line;\n')
    two.write_text("int more;\n")
    before = source_in(tree).digest()
    one.write_text('#include "two.cuh"\n')
    two.write_text("int line;\nint more;\n")
    assert source_in(tree).digest() != before


def test_a_new_file_that_shadows_an_included_one_changes_the_digest(tree: Path) -> None:
    before = source_in(tree).digest()
    (tree / "sub/three.cuh").write_text("int nearer;\n")
    assert source_in(tree).digest() != before


def test_sources_of_the_users_see_their_own_folder_first_then_the_package(tmp_path: Path) -> None:
    (tmp_path / "main.cu").write_text('#include "types.cuh"\n#include "numeric/bf16.cuh"\n')
    own = source_in(tmp_path)
    assert own.include_dirs == (tmp_path, kernels_dir())
    names = [path.name for path in include_closure(own.path, own.include_dirs)]
    assert names[:3] == ["main.cu", "types.cuh", "bf16.cuh"]
    inside = KernelSource(kernels_dir() / "bf16_absmax.cu", "bf16_absmax", ())
    assert inside.include_dirs == (kernels_dir(),)


def test_every_quoted_include_of_the_package_is_found() -> None:
    for path in kernels_dir().rglob("*.cu*"):
        closure = include_closure(path, (kernels_dir(),))
        for included in closure:
            for name in source_module._INCLUDE.findall(included.read_text()):
                found = any((folder / name).is_file() for folder in (included.parent, kernels_dir()))
                assert found or name.startswith("cupaged_emulator"), f"{included}: {name}"


def test_kernels_dir_prefers_the_installed_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "cupaged"
    for folder in (package / "_cuda", tmp_path / "kernels"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(source_module, "_PACKAGE", package)
    find = kernels_dir.__wrapped__
    with pytest.raises(KernelSourceError, match=r"no CUDA sources .*the installation is incomplete"):
        find()
    (tmp_path / "kernels" / "platform.cuh").touch()
    assert find() == tmp_path / "kernels"
    (package / "_cuda" / "platform.cuh").touch()
    assert find() == package / "_cuda"


def test_a_digest_is_kept_while_no_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, path = tmp_path / "a.cuh", tmp_path / "k.cu"
    header.write_text("1")
    path.write_text('#include "a.cuh"\n')
    long_ago = 1_500_000_000
    for file in (header, path):
        os.utime(file, (long_ago, long_ago))
    monkeypatch.setattr("cupaged.source.kernels_dir", lambda: tmp_path)
    source, reads = KernelSource(path, "k", ()), []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: reads.append(self) or read_bytes(self))
    first = source.digest()
    assert (source.digest(), len(reads)) == (first, 2)
    header.write_text("2")
    second = source.digest()
    assert second != first
    header.write_text("3")  # as many bytes, at nearly the same time
    assert source.digest() not in (first, second)
    header.unlink()
    assert source.digest() not in (first, second)
