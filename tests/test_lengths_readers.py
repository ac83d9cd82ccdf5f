"""Files of lengths: every format gives the same numbers, and what is wrong is named with its line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.lengths import LengthsError, progress, read_lengths

LENGTHS = [5, 1, 2**31 - 1, 77, 512]
SHAPES = [[3, 4], [16, 256], [1, 1]]


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.txt", "5\n1\n2147483647\n77\n512\n", None),
        ("a", "# lengths\r\n5\r\n\r\n 1 # one\r\n2147483647\r\n77.0\r\n512", None),
        ("bom.txt", b"\xef\xbb\xbf5\n1\n2147483647\n77\n512", None),
        ("plain.csv", "5\n1\n2147483647\n77\n512\n", None),
        ("a.csv", "length\n5\n1\n\n2147483647\n77\n512\n", None),
        ("a.csv", 'id,"the length"\n"a,b",5\n"two\nlines",1\nc,2147483647\nd,"77"\ne,512', "the length"),
        ("a.csv", "id; n\n9; 5\n9; 1\n9; 2147483647\n9; 77\n9; 512\n", "n"),
        ("a.csv", "id, n\n9, 5\n9, 1\n9, 2147483647\n9, 77\n9, 512\n", "n"),
        ("a.tsv", "id\tn\n9\t5\n9\t1\n9\t2147483647\n9\t77\n9\t512\n", "n"),
        ("a.jsonl", "5\n1\n\n2147483647\n77.0\n512\n", None),
        ("a.ndjson", "".join(json.dumps({"n": n}) + "\n" for n in LENGTHS), None),
        ("a.json", "".join(json.dumps({"n": n, "text": "x"}) + "\n" for n in LENGTHS), "n"),
    ],
)
def test_one_axis(tmp_path: Path, name: str, content: str | bytes, column: str | None) -> None:
    found = read_lengths(write(tmp_path, name, content), column)
    assert found.dtype == np.int64
    assert found.tolist() == LENGTHS


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.txt", "3 4\n16x256\n1, 1\n", None),
        ("a.txt", "3\t4\n16 x 256\n1;1\n", None),
        ("plain.csv", "3,4\n16,256\n1,1\n", None),
        ("a.csv", "frames,patches,id\n3,4,7\n16,256,8\n1,1,9\n", "frames, patches"),
        ("a.csv", "shape,id\n3x4,7\n16x256,8\n1x1,9\n", "shape"),
        ("a.jsonl", "[3, 4]\n[16, 256]\n[1, 1]\n", None),
        ("a.jsonl", "".join(json.dumps({"s": s, "f": s[0], "p": s[1]}) + "\n" for s in SHAPES), "s"),
        ("a.jsonl", "".join(json.dumps({"s": s, "f": s[0], "p": s[1]}) + "\n" for s in SHAPES), "f,p"),
    ],
)
def test_several_axes(tmp_path: Path, name: str, content: str, column: str | None) -> None:
    assert read_lengths(str(write(tmp_path, name, content)), column).tolist() == SHAPES


def test_lists_of_tokens_count_by_their_length(tmp_path: Path) -> None:
    rows = [[7, 8, 9, 10], [1], [2, 3]]
    path = write(tmp_path, "a.jsonl", "".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    assert read_lengths(path).tolist() == [4, 1, 2]
    path = write(tmp_path, "b.jsonl", '["a", "b"]\n["c"]\n')
    assert read_lengths(path).tolist() == [2, 1]


def test_numpy(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    for kind in (np.int64, np.uint32, np.float64):
        np.save(path, np.asarray(LENGTHS, dtype=kind))
        assert read_lengths(path).tolist() == LENGTHS
    np.save(path, np.asarray(SHAPES, dtype=np.int16))
    assert read_lengths(path).tolist() == SHAPES
    path = tmp_path / "a.npz"
    np.savez(path, lengths=LENGTHS)
    assert read_lengths(path).tolist() == LENGTHS
    np.savez(path, f=[3, 16, 1], p=[4, 256, 1], both=SHAPES)
    assert read_lengths(path, "both").tolist() == SHAPES
    assert read_lengths(path, "f,p").tolist() == SHAPES
    with pytest.raises(LengthsError, match=r"has the columns f, p, both"):
        read_lengths(path)
    with pytest.raises(LengthsError, match=r"f, both have the shapes"):
        read_lengths(path, "f,both")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.integers(1, 1290)] * 3), min_size=1, max_size=30), st.integers(1, 3))
def test_every_format_gives_the_same(tmp_path_factory: Any, rows: list[tuple[int, int, int]], axes: int) -> None:
    folder = tmp_path_factory.mktemp("formats")
    shapes = [row[:axes] for row in rows]
    found = [
        read_lengths(write(folder, "a.txt", "\n".join("x".join(map(str, s)) for s in shapes))),
        read_lengths(write(folder, "a.jsonl", "\n".join(json.dumps(s) for s in shapes))),
        read_lengths(write(folder, "a.csv", "a,b,c\n" + "\n".join(",".join(map(str, r)) for r in rows)), "a,b,c"),
    ]
    np.save(folder / "a.npy", shapes)
    found.append(read_lengths(folder / "a.npy"))
    wanted = np.asarray(shapes)[:, 0] if axes == 1 else np.asarray(shapes)
    assert [f.tolist() for f in (*found[:2], found[3])] == [wanted.tolist()] * 3
    assert found[2].tolist() == [list(row) for row in rows]


SIXTEEN = "7\n" * 16


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        (
            "a.txt",
            SIXTEEN + "seven\n",
            None,
            r"a.txt, line 17: got 'seven'; a size is an integer from 1 to 2147483647",
        ),
        ("a.txt", "7\n-3\n", None, r"line 2: the size is -3; a size is an integer from 1"),
        ("a.txt", "7\n0\n", None, r"line 2: the size is 0"),
        ("a.txt", "nan\n", None, r"line 1: got 'nan'"),
        ("a.txt", "3\ninf\n", None, r"line 2: got 'inf'"),
        ("a.txt", "3\n-1e400\n", None, r"line 2: got '-1e400'"),
        ("a.txt", "1.5\n", None, r"line 1: got '1.5'"),
        ("a.txt", "2147483648\n", None, r"line 1: the size is 2147483648"),
        ("a.txt", "1" * 30, None, r"line 1: the size is 1111"),
        ("a.txt", "65536x65536", None, r"line 1: the shape \(65536, 65536\) has 4294967296 tokens"),
        ("a.txt", "3\n3 4\n", None, r"line 2: 2 sizes, but line 1 has 1; all samples must have as many"),
        ("a.txt", "1 2 3 4\n", None, r"line 1: 4 sizes; one sample has 1 to 3"),
        ("a.txt", ",\n", None, r"line 1: 0 sizes"),
        ("a.txt", "", None, r"holds no length; it must have at least one sample"),
        ("a.txt", "# only this\n\n", None, r"holds no length"),
        ("a.txt", b"7\n\xff\xfe\n", None, r"line 2: not UTF-8 .*save it as UTF-8"),
        ("a.txt", "7\n", "length", r"read as text, which has no columns"),
        ("a.csv", "id,length\n1,7\n2,x1y\n", "length", r"line 3: got 'x1y'"),
        ("a.csv", "id,length\n1,7\n", None, r"has the columns id, length; say which"),
        ("a.csv", "id,length\n1,7\n", "len", r"has no column 'len'; it has id, length"),
        ("a.csv", "id,length\n1,7\n2\n", "length", r"line 3: 1 cells; the header has 2"),
        ("a.csv", "id,length\n1,7\n2,\n", "length", r"line 3: an empty cell"),
        ("a.csv", 'id,length\n1,7\n"2"",3\n', "length", r"no CSV"),
        ("a.csv", "id,length\n", "length", r"holds no length"),
        ("a.csv", "", None, r"has the columns none"),
        ("a.jsonl", '{"n": 7}\n{"m": 7}\n', "n", r"line 2 has no column 'n'; it has m"),
        ("a.jsonl", '{"n": 7, "m": 1}\n', None, r"line 1 has the columns n, m; say which"),
        ("a.jsonl", "7\n", "n", r"line 1: no object with the column 'n'"),
        ("a.jsonl", "7\n{seven\n", None, r"line 2: no JSON value"),
        ("a.jsonl", "true\n", None, r"line 1: got True"),
        ("a.jsonl", '{"n": "a long text"}\n', "n", r"line 1: got 'a long text'"),
        ("a.jsonl", "null\n", None, r"line 1: got None"),
        ("a.jsonl", "NaN\n", None, r"line 1: got nan"),
        ("a.jsonl", "7\nInfinity\n", None, r"line 2: got inf"),
        ("a.txt", b"100\r200\r300\r", None, r"line 1: a carriage return inside it"),
        ("a.csv", "n,n\n1,2\n", "n", r"has the column 'n' more than once"),
        ("a.jsonl", "7\n" + "[" * 100_000, None, r"line 2: no JSON value"),
        ("a.json", "[512, 1024, 2048, 300]\n", None, r"is one list, which could be one sample or many"),
        ("a.json", "[16, 256]", None, r"is one list, which could be one sample or many"),
        ("a.jsonl", "[]\n", None, r"line 1: an empty list"),
        (
            "a.jsonl",
            "[1, 2]\n[1, 2, 3, 4, 5]\n",
            None,
            r"line 2: a list of 5, but the first .* store their number",
        ),
        ("a.jsonl", "[1, 2.5]\n", None, r"line 1: got 2.5"),
        ("a.npy", "7\n", None, r"is no NumPy file"),
        ("a.npy", b"", None, r"is no NumPy file"),
        ("a.npz", b"PK\x03\x04 no archive", "n", r"is no NumPy file|cannot be read"),
        ("a.parquet", "7\n", None, r"Parquet"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, name: str, content: str | bytes, column: str | None, message: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(LengthsError, match=message) as caught:
        read_lengths(path, column)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ([3, 4, -1], "row 3: the size is -1"),
        ([3.0, np.nan], "row 2: got nan"),
        ([3.0, np.inf], "row 2: got inf"),
        ([3.0, 2.5], "row 2: got 2.5"),
        ([2**31], "row 1: the size is 2147483648"),
        ([[3, 4], [2**16, 2**16]], r"row 2: the shape \(65536, 65536\)"),
        ([True], "type bool"),
        (["7"], "type <U1"),
        ([[[1]]], r"shape \(1, 1, 1\)"),
        ([[1, 2, 3, 4]], "4 sizes; one sample has 1 to 3"),
        (5, r"shape \(\)"),
        ([], "holds no length"),
    ],
)
def test_wrong_arrays(tmp_path: Path, array: Any, message: str) -> None:
    np.save(tmp_path / "a.npy", np.asarray(array))
    with pytest.raises(LengthsError, match=message):
        read_lengths(tmp_path / "a.npy")
    with pytest.raises(LengthsError, match="one array without columns"):
        read_lengths(tmp_path / "a.npy", "n")


def test_archives_and_arrays_under_each_others_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", n=np.arange(1, 5))
    np.save(tmp_path / "y.npy", np.arange(1, 5))
    (tmp_path / "x.npz").rename(tmp_path / "x.npy")
    (tmp_path / "y.npy").rename(tmp_path / "y.npz")
    with pytest.raises(LengthsError, match="several arrays, not one; .* ends in .npz"):
        read_lengths(tmp_path / "x.npy")
    with pytest.raises(LengthsError, match="one array, not an archive; .* ends in .npy"):
        read_lengths(tmp_path / "y.npz")


def test_damaged_arrays(tmp_path: Path) -> None:
    """Whatever bytes are hit: sizes, or the error for files that cannot be read."""
    np.savez_compressed(tmp_path / "good.npz", n=np.random.default_rng(0).integers(1, 9_999, 300))
    np.save(tmp_path / "good.npy", np.arange(1, 300))
    damage = np.random.default_rng(1)
    read = 0
    for name in ("good.npz", "good.npy"):
        content = (tmp_path / name).read_bytes()
        for start in damage.integers(0, len(content), 60).tolist():
            path = write(tmp_path, f"bad{name[4:]}", content[:start] + damage.bytes(20) + content[start + 20 :])
            # Any other error fails the test.
            with contextlib.suppress(LengthsError):
                read_lengths(path)
                read += 1
    assert 0 < read < 90
    header = (tmp_path / "good.npy").read_bytes().replace(b"(299,)", b"(-29,)")
    with pytest.raises(LengthsError, match="is no NumPy file of numbers"):
        read_lengths(write(tmp_path, "negative.npy", header))


def test_half_precision_gives_no_warning(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asarray([15, 70], dtype=np.float16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_lengths(tmp_path / "a.npy").tolist() == [15, 70]


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asarray([{"a": 1}]), allow_pickle=True)
    with pytest.raises(LengthsError, match="no NumPy file of numbers"):
        read_lengths(tmp_path / "a.npy")
    np.savez(tmp_path / "a.npz", n=np.asarray([{"a": 1}], dtype=object))
    with pytest.raises(LengthsError, match="cannot be read"):
        read_lengths(tmp_path / "a.npz")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(LengthsError, match="nothing.txt does not exist; give a file of lengths"):
        read_lengths(tmp_path / "nothing.txt")
    with pytest.raises(LengthsError, match="is a directory"):
        read_lengths(tmp_path)


def test_a_pipe_is_no_missing_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(LengthsError, match="pipe.txt is no regular file"):
        read_lengths(tmp_path / "pipe.txt")


def test_large_files_take_little_memory(tmp_path: Path) -> None:
    """8 bytes per sample and one chunk of lines, not a Python object for each."""
    count = 100_000
    path = write(tmp_path, "a.txt", "1000\n" * count)
    read_lengths(write(tmp_path, "warm.txt", "1\n"))
    tracemalloc.start()
    try:
        assert len(read_lengths(path)) == count
        assert tracemalloc.get_traced_memory()[1] < 8 * count * 1.2 + 25 * 2**20
    finally:
        tracemalloc.stop()


def test_a_bar_shows_the_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    path = write(tmp_path, "a.txt", "1000\n" * 1000)
    shown, silent = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(shown):
        read_lengths(path, progress=True)
    with contextlib.redirect_stderr(silent):
        read_lengths(path)
    assert "reading lengths" in shown.getvalue()
    assert silent.getvalue() == ""


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LengthsError, match=r"needs pyarrow: pip install lightning-dcp\[parquet\]"):
        read_lengths(write(tmp_path, "a.parquet", "PAR1"))


def parquet(folder: Path, **columns: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional dependency")
    from pyarrow import parquet as files

    path = folder / "a.parquet"
    files.write_table(pyarrow.table(columns), path, row_group_size=3)
    return path


def test_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path, n=LENGTHS, text=["a"] * 5, f=[1.0, 2.0, 3.0, 4.0, 5.0], g=range(1, 6))
    assert read_lengths(path, "n").tolist() == LENGTHS
    assert read_lengths(path, "f", progress=True).tolist() == [1, 2, 3, 4, 5]
    assert read_lengths(path, "f,g").tolist() == [[k, k] for k in range(1, 6)]
    assert read_lengths(parquet(tmp_path, shape=SHAPES)).tolist() == SHAPES
    assert read_lengths(parquet(tmp_path, ids=[[1, 2, 3, 4], [5], [6, 7]])).tolist() == [4, 1, 2]
    assert read_lengths(parquet(tmp_path, words=[["a", "b"], ["c"]])).tolist() == [2, 1]
    path = parquet(tmp_path, shape=[[2, k] for k in range(1, 100_001)])
    assert read_lengths(path).shape == (100_000, 2)


def test_wrong_parquet(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str | None, str]] = [
        ({"n": [1, 2], "m": [1, 2]}, None, "has the columns n, m"),
        ({"n": [1, 2]}, "m", "has no column 'm'; it has n"),
        ({"n": [3, 4, 5, 6, -1]}, None, "row 5: the size is -1"),
        ({"n": [1, None]}, None, "row 2: no value"),
        ({"n": [1.5]}, None, "row 1: got 1.5"),
        ({"n": [float("nan")]}, None, "row 1: got nan"),
        ({"n": ["7"]}, None, "type string"),
        ({"n": [True]}, None, "type bool"),
        ({"n": [[1, 2], [3]]}, None, "row 2: a list of 1, but lists of 2"),
        ({"n": [[1, 2, 3], [1, 2, 3, 4]]}, None, "row 2: a list of 4, .* store their number"),
        ({"n": [[1, None]]}, None, "no value on an axis"),
        ({"n": [[1, 2, 3, 4], []]}, None, "row 2: the size is 0"),
        ({"n": [[], [1, 2, 3, 4]]}, None, "row 1: an empty list"),
        ({"n": [[1, 2], [3, 4], []]}, None, "row 3: an empty list"),
    ]
    for columns, column, message in cases:
        with pytest.raises(LengthsError, match=message):
            read_lengths(parquet(tmp_path, **columns), column)
