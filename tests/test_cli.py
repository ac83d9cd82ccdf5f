"""The command line: what it prints, what it refuses and how, and that it starts at once."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_dcp.cli import COMMANDS, main
from lightning_dcp.cli.parsing import planner_spec, positive_ints
from lightning_dcp.cli.places import place_of
from lightning_dcp.lengths import read_lengths
from lightning_dcp.permutation import permutation
from lightning_dcp.planners import Balanced
from lightning_dcp.simulate import Cluster, hours_needed, own_work, simulate
from tests.synthetic import analytic_profile
from tests.test_simulate import KEYS

ROOT = Path(__file__).parent.parent
LENGTHS = np.random.default_rng(8).integers(8, 2_000, 60)
PROFILE = replace(analytic_profile((1, 2, 4)), sync_time=5_000_000)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with lengths and a profile, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("lengths.txt").write_text("\n".join(map(str, LENGTHS)) + "\n")
    Path("profile.json").write_text(PROFILE.to_json())
    return tmp_path


def words(*more: str, lengths: str = "lengths.txt", planner: str | None = "balanced") -> list[str]:
    """A simulation of three steps of ten on four ranks."""
    base = ["simulate", "--lengths", lengths, "--profile", "profile.json", "--memory-limit", "400MB"]
    base += ["--world-size", "4", "--global-batch-size", "10", "--steps", "3"]
    return [*base, *(["--planner", planner] if planner else []), *more]


def call(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.usefixtures("files")
def test_json_is_one_list_of_objects_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(*words("--planner", "static:sp_size=2,batch_size=2", "--json"), capsys=capsys)
    first, second = json.loads(out)
    assert code == 0
    assert (first["planner"], second["planner"]) == ("balanced", "static:sp_size=2,batch_size=2")
    cluster = Cluster.build(PROFILE, 4, memory_bytes=400_000_000)
    expected = simulate(LENGTHS, cluster, Balanced(), steps=3, global_batch_size=10).as_json()
    timed = ("planning_ms", "planning_ms_worst")
    assert {k: v for k, v in first.items() if k not in timed} == {
        k: v for k, v in expected.items() if k not in timed
    }
    assert first.keys() == second.keys() == expected.keys()
    assert second["tokens_per_second"] < first["tokens_per_second"]


@pytest.mark.usefixtures("files")
def test_weak_scaling_keeps_the_samples_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(*words("--weak-scaling", "8,2", "--json"), capsys=capsys)
    (found,) = json.loads(out)
    expected = []
    for world_size, batch_size in ((2, 5), (8, 20)):
        cluster = Cluster.build(PROFILE, world_size, memory_bytes=400_000_000)
        result = simulate(LENGTHS, cluster, Balanced(), steps=3, global_batch_size=batch_size)
        expected.append([world_size, result.tokens_per_second])
    assert found["weak_scaling"] == expected


@pytest.mark.usefixtures("files")
def test_the_table_shows_each_planner(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(*words("--planner", "static", "--weak-scaling", "2,4"), capsys=capsys)
    assert code == 0
    for part in (
        *(
            "lengths.txt: 60 samples",
            "4 GPUs in 1 node",
            "400.0 MB each",
            "5.0 ms at the end of a step",
            "30 samples: 3 x 10",
        ),
        *("\nplanner ", "\nbalanced ", "\nstatic ", "2 GPUs", "(100.0 %)"),
    ):
        assert part in out, part


@pytest.mark.usefixtures("files")
def test_plans_are_written_per_planner(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words("--plans", "one.jsonl"), capsys=capsys)[0] == 0
    arguments = words("--plans", "p.jsonl", "--planner", "static:sp_size=2", "--seed", "4")
    assert call(*arguments, capsys=capsys)[0] == 0
    assert sorted(path.name for path in Path().glob("*.jsonl")) == [
        *("one.jsonl", "p.balanced.jsonl", "p.static-sp_size-2.jsonl"),
    ]
    for name in ("p.balanced.jsonl", "p.static-sp_size-2.jsonl"):
        steps = [json.loads(line) for line in Path(name).read_text().splitlines()]
        assert [step["step"] for step in steps] == [0, 1, 2]
        trained = [[i for m in step["micro_batches"] for i in m["samples"]] for step in steps]
        order = permutation(4, 0, 60)[:30].reshape(3, 10)
        assert [sorted(ids) for ids in trained] == [sorted(ids) for ids in order.tolist()]


@pytest.mark.usefixtures("files")
def test_ids_of_further_epochs_are_positions_in_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("few.txt").write_text("50\n60\n70\n")
    assert call(*words("--plans", "p.jsonl", lengths="few.txt"), capsys=capsys)[0] == 0
    steps = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    ids = [i for step in steps for m in step["micro_batches"] for i in m["samples"]]
    assert sorted(ids) == sorted(10 * [0, 1, 2])


@pytest.mark.usefixtures("files")
def test_limits_hold_for_all_planners_or_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    planners = [word for b in ("4", "3", "3,max_batch_size=2") for word in ("--planner", f"static:batch_size={b}")]
    arguments = words(*planners, "--max-batch-size", "3", "--plans", "p.jsonl", planner=None)
    assert call(*arguments, capsys=capsys)[0] == 0

    def most(name: str) -> int:
        steps = [json.loads(line) for line in Path(name).read_text().splitlines()]
        return max(len(m["samples"]) for step in steps for m in step["micro_batches"])

    # A micro-batch over a limit is cut in halves.
    assert most("p.static-batch_size-4.jsonl") == 2
    assert most("p.static-batch_size-3.jsonl") == 3
    assert most("p.static-batch_size-3-max_batch_size-2.jsonl") == 2


@pytest.mark.usefixtures("files")
def test_packing_is_for_all_or_for_one_and_never_for_what_pads(capsys: pytest.CaptureFixture[str]) -> None:
    def packed(*more: str, labels: tuple[str, ...]) -> list[bool]:
        planners = [word for label in labels for word in ("--planner", label)]
        code, out, err = call(
            *words(*planners, *more, "--plans", "p.jsonl", "--json", planner=None), capsys=capsys
        )
        assert code == 0, err
        assert all(found["samples_dropped"] == found["samples_repeated"] == 0 for found in json.loads(out))
        rows = []
        for label in labels:
            lines = Path(f"p.{re.sub('[:=]', '-', label)}.jsonl").read_text().splitlines()
            batches = [m for line in lines for m in json.loads(line)["micro_batches"]]
            rows.append(any(len({*map(tuple, m["shapes"])}) > 1 and m["packed"] for m in batches))
            for m in batches:
                assert m["padded_shape"][0] >= (sum if m["packed"] else max)(shape[0] for shape in m["shapes"])
        return rows

    assert packed(labels=("balanced", "balanced:packing=true", "packed", "static")) == [False, True, True, False]
    assert packed("--packing", labels=("balanced", "plain", "static", "bucket")) == [True, False, False, False]


def hours(world_size: int, samples: int) -> float:
    """Of so many samples on nodes of two ranks, planned by ``balanced``."""
    cluster = Cluster.build(PROFILE, world_size, memory_bytes=400_000_000, ranks_per_node=2)
    result = simulate(LENGTHS, cluster, Balanced(), steps=3, global_batch_size=10)
    return hours_needed(result, samples * float(own_work(cluster.cost, LENGTHS[:, None]).mean()))


@pytest.mark.usefixtures("files")
def test_an_option_of_the_planner_wins_over_the_limit_of_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    """bucket recomputes all layers unless its own option says otherwise; balanced has no such option but a limit."""
    arguments = words(
        "--planner", "balanced:recompute=full", "--planner", "bucket:recompute=none", "--planner", "bucket"
    )
    assert call(*arguments, "--plans", "p.jsonl", capsys=capsys)[0] == 0

    def depths(name: str) -> set[int]:
        steps = [json.loads(line) for line in Path(name).read_text().splitlines()]
        return {r for step in steps for m in step["micro_batches"] for r in m["recompute"]}

    assert depths("p.balanced.jsonl") == depths("p.bucket-recompute-none.jsonl") == {0}
    assert depths("p.balanced-recompute-full.jsonl") == depths("p.bucket.jsonl") == {4}


@pytest.mark.usefixtures("files")
def test_price_and_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    deadline = 0.45 * hours(2, 100_000)
    more = ["--price", "3", "--deadline", repr(deadline), "--samples", "100000"]
    more += ["--planner", "static", "--ranks-per-node", "2", "--world-size", "2"]
    code, out, _ = call(*words(*more, "--json"), capsys=capsys)
    first, second = json.loads(out)
    assert code == 0
    for found in (first, second):
        assert found["cost"] == pytest.approx(found["hours"] * 2 * 3)
    assert first["hours"] == pytest.approx(hours(2, 100_000))
    assert second["hours"] / first["hours"] == pytest.approx(
        first["tokens_per_second"] / second["tokens_per_second"]
    )
    assert "smallest_world_size" not in second, "only the best planner is looked at"
    smallest = first["smallest_world_size"]
    assert smallest == next(w for w in (1, 2, 4, 6, 8) if hours(w, 100_000) <= deadline)
    _, text, _ = call(*words(*more), capsys=capsys)
    answer = f"fewest GPUs for {deadline:g} h: {smallest} ({smallest // 2} nodes) with balanced"
    place = f"lengths.txt, line {LENGTHS.argmax() + 1}"
    for part in (
        answer,
        "cost at 3 per GPU hour",
        f"{LENGTHS.max():,} tokens ({place}): fits from p = 1",
    ):
        assert part in text, part


@pytest.mark.usefixtures("files")
def test_a_deadline_that_nothing_meets(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(*words("--deadline", "0.0000001"), capsys=capsys)
    assert code == 0
    assert "no number of GPUs meets 1e-07 h with balanced and 10 samples a step" in out


@pytest.mark.usefixtures("files")
def test_the_plain_planner_and_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = words("--planner", "plain", "--planner", "floating", "--plot", "x.png", planner=None)
    code, out, err = call(*arguments, capsys=capsys)
    assert code == 0, err
    assert "\nplain " in out
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")


FAR = "\n".join(["# header", *["100"] * 12, "", "9999999", "9999998"])

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a negative length": ({"file": ("x.txt", "5\n-3\n")}, "x.txt, line 2: "),
    "NaN": ({"file": ("x.txt", "5\nnan\n")}, "x.txt, line 2: "),
    "an empty file": ({"file": ("x.txt", "")}, "x.txt holds no length"),
    "text in line 17": ({"file": ("x.txt", "5\n" * 16 + "hello\n")}, "x.txt, line 17: got 'hello'"),
    "a missing column": ({"file": ("x.csv", "a,b\n5,6\n"), "more": ["--column", "c"]}, "no column 'c'"),
    "a missing file": ({"lengths": "nowhere.txt"}, "nowhere.txt does not exist"),
    "a length that fits nowhere": (
        {"file": ("x.txt", FAR)},
        r"x.txt, line 15: sample 12 of shape \(9999999,\) .* limit",
    ),
    "a length that a planner cannot place": (
        {"planner": "static", "more": ["--memory-limit", "10MB"]},
        r"lengths.txt, line \d+: sample \d+ of shape",
    ),
    "an unknown planner": ({"planner": "fastest"}, "planner 'fastest' is unknown; allowed are .*balanced"),
    "an unknown option": (
        {"planner": "static:speed=3"},
        r"'static' has no option \['speed'\]; allowed are sp_size, batch_size, deal",
    ),
    "an option twice": ({"planner": "static:sp_size=1,sp_size=2"}, "with each key once"),
    "an option without value": ({"planner": "static:sp_size"}, "not of the form name:key=value"),
    "an option of plain": ({"planner": "plain:sp_size=2"}, r"takes no option, not \['sp_size'\]"),
    "a limit of another kind": ({"planner": "balanced:packing=3"}, "packing is 3; it must be true or false"),
    "a limit below 1": (
        {"planner": "balanced:max_tokens=0"},
        "max_tokens is 0; it must be an integer of at least 1",
    ),
    "a planner twice": ({"more": ["--planner", "balanced"]}, "planner balanced is given twice"),
    "no planner": ({"planner": None}, "required: --planner"),
    "an unknown profile": (
        {"more": ["--profile", "h100"]},
        "profile 'h100' is neither a file nor .* h200-transformer-1d",
    ),
    "a file that is no profile": ({"more": ["--profile", "lengths.txt"]}, "lengths.txt: this is no profile"),
    "no ranks": ({"more": ["--world-size", "0"]}, "argument --world-size: '0' is no integer of at least 1"),
    "ranks in words": ({"more": ["--world-size", "four"]}, "argument --world-size: 'four'"),
    "too many ranks": ({"more": ["--world-size", "9999999"]}, "world_size is 9999999; allowed are 1 to"),
    "an empty step": ({"more": ["--global-batch-size", "0"]}, "argument --global-batch-size: '0'"),
    "a negative seed": ({"more": ["--seed", "-1"]}, "argument --seed: '-1'"),
    "memory without unit": ({"more": ["--memory-limit", "80"]}, "memory_limit is '80'; .*\"80GB\""),
    "a length that fits no smaller world": (
        {"more": ["--weak-scaling", "1,8", "--memory-limit", "10MB"]},
        r"lengths.txt, line \d+: sample \d+ of shape .*sp_sizes up to now: \(1,\)",
    ),
    "a size without profile": ({"more": ["--sp-sizes", "1,3"]}, r"sp_sizes is \(1, 3\); allowed .* \[1, 2, 4\]"),
    "a free price": ({"more": ["--price", "0"]}, "argument --price: '0' is no number above 0"),
    "an infinite deadline": ({"more": ["--deadline", "inf"]}, "argument --deadline: 'inf'"),
    "an unknown argument": ({"more": ["--speed", "3"]}, "unrecognized arguments: --speed 3"),
    "a picture of no format": ({"more": ["--plot", "x.xyz"]}, "x.xyz is no picture that can be written"),
    "plans in no folder": ({"more": ["--plans", "none/p.jsonl"]}, "none/p.jsonl cannot be written"),
    "plans in place of the lengths": ({"more": ["--plans", "./lengths.txt"]}, "lengths.txt is read and cannot"),
    "plans in place of the profile": ({"more": ["--plans", "profile.json"]}, "profile.json is read and cannot"),
    "plans in a folder's name": ({"more": ["--plans", "."]}, "cannot be written: it is a folder"),
    "a picture in a folder's name": ({"more": ["--plot", "folder.png"]}, "folder.png is no picture"),
    "more ranks than a float counts": (
        {"more": ["--world-size", "9" * 400]},
        "99999... is too large; allowed are",
    ),
    "samples without end": ({"more": ["--samples", "9" * 400]}, "99999... is too large; allowed are"),
    "steps without end": (
        {"more": ["--steps", "9" * 12]},
        "steps=999999999999, global_batch_size=10; allowed are .* 1099511627776 in all",
    ),
    "a step without end": (
        {"more": ["--global-batch-size", "9" * 9]},
        "global_batch_size=999999999; allowed are up to 16777216 samples in a step",
    ),
    "an option in the wrong units": (
        {"planner": "static:batch_size=1e3"},
        r"batch_size=1000\.0; allowed are integers from 1",
    ),
    "a flag for a number": ({"planner": "balanced:max_moves=true"}, "max_moves=True; allowed are integers from 0"),
    "a number for a flag": ({"planner": "balanced:lockstep=3"}, "lockstep=3; allowed are True and False"),
    "a length that cannot be padded": (
        {"file": ("x.txt", "5\n\n2147483647\n")},
        r"x.txt, line 3: sample 1 of shape \(2147483647,\) has 2147483648 tokens where sp_size is 4",
    ),
    "samples of another model": (
        {"file": ("x.txt", "5 6\n7 8\n")},
        "x.txt has samples of 2 axes, and profile profile.json was measured with 1; give one size for each axis",
    ),
    "a column of no file": ({"lengths": "short", "more": ["--column", "a"]}, "short is no file"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("files")
def test_wrong_input_gives_one_sentence(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, message = dict(REFUSED[case][0]), REFUSED[case][1]
    if "file" in options:
        options["lengths"], text = options.pop("file")
        Path(options["lengths"]).write_text(text)
    Path("folder.png").mkdir()
    before = Path("lengths.txt").read_text()
    code, out, err = call(*words(*options.pop("more", ()), **options), capsys=capsys)
    assert (code, out) == (2, "")
    assert Path("lengths.txt").read_text() == before
    assert len(err.splitlines()) == 1
    assert err.startswith("lightning-dcp simulate: ")
    assert re.search(message, err), err


@pytest.mark.parametrize(
    ("name", "text", "column"),
    [
        ("x.txt", "# sizes\n5\n\n6 # six\n  \n7\n8", None),
        ("x.csv", "id,size\n1,5\n\n2,6\n3,7\n4,8\n", "size"),
        ("x.csv", "5\n\n6\n7\n8\n", None),
        ("x.csv", "5\n  \n# more\n6\n7\n8\n", None),
        ("x.csv", "id;size\n1;5\n\n2;6\n3;7\n4;8\n", "size"),
        ("x.csv", 'id,size\n"a\rb",5\nc,6\nd,7\n"e\nf",8\n', "size"),
        ("x.csv", "1,2\n1,5\n1,6\n1,7\n1,8\n", "2"),
        ("x.tsv", 'name\tsize\n"two\nlines"\t5\nb\t6\nc\t7\nd\t8\n', "size"),
        ("x.jsonl", '5\n6\n\n7\n{"#": 8}\n', None),
    ],
)
def test_places_are_those_that_the_reader_names(tmp_path: Path, name: str, text: str, column: str | None) -> None:
    """The line of each sample is the one that the reader complains about when it is broken."""
    path = tmp_path / name
    path.write_text(text)
    if name == "x.jsonl":
        text = text.replace('{"#": 8}', "8")
        path.write_text(text)
    assert read_lengths(path, column).tolist() == [5, 6, 7, 8]
    broken = tmp_path / f"broken{path.suffix}"
    for position, size in enumerate("5678"):
        broken.write_text(text[::-1].replace(size, "0", 1)[::-1])
        with pytest.raises(ValueError, match="size") as caught:
            read_lengths(broken, column)
        assert f", {place_of(path, position, column)}:" in str(caught.value)


def test_rows_are_places_where_there_are_no_lines() -> None:
    assert place_of(Path("x.npy"), 4) == place_of(Path("x.parquet"), 4) == "row 5"


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(_: Any) -> int:
        raise MemoryError("Unable to allocate 7 TiB")

    monkeypatch.setattr("lightning_dcp.cli.simulate.run", run)
    assert main(["simulate"]) == 2
    assert "not enough memory (Unable to allocate 7 TiB); use smaller steps" in capsys.readouterr().err


@pytest.mark.usefixtures("files")
def test_samples_beyond_the_profile_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.txt").write_text("5\n16384\n16385\n20000\n")
    code, out, err = call(*words("--memory-limit", "4GB", "--json", lengths="x.txt"), capsys=capsys)
    assert (code, len(json.loads(out))) == (0, 1)
    assert err.startswith("note: 2 of 4 samples are longer than the 16,384 tokens that the profile ends at")
    assert call(*words(), capsys=capsys)[2] == ""


def test_planners_are_read_with_their_options() -> None:
    assert planner_spec("static") == ("static", "static", {})
    text = "a:b=1,c=1.5,d=true,e=none,f=x.json,g=-2,h=1e3"
    assert planner_spec(text) == (
        text,
        "a",
        {"b": 1, "c": 1.5, "d": True, "e": "none", "f": "x.json", "g": -2, "h": 1000.0},
    )
    assert positive_ints("8,32") == (8, 32)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_in_its_list_and_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call("--help", capsys=capsys)
    assert (code, name in out, COMMANDS[name].help in " ".join(out.split())) == (0, True, True)
    code, out, _ = call(name, "--help", capsys=capsys)
    assert (code, f"usage: lightning-dcp {name}" in out) == (0, True)
    assert callable(getattr(import_module(COMMANDS[name].module), COMMANDS[name].function))


@pytest.mark.parametrize(("arguments", "code"), [((), 2), (("fly",), 2), (("--version",), 0), (("--help",), 0)])
def test_without_a_command(arguments: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    found, out, err = call(*arguments, capsys=capsys)
    assert found == code
    assert len(err.splitlines()) == (1 if code else 0)
    assert bool(out) == (code == 0)


def test_the_documented_commands_and_keys_exist() -> None:
    text = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
    lines = re.findall(
        r"^(?:\$ |next: )?lightning-dcp ((?:audit|simulate) (?!.*: ).*)$", text.replace("\\\n", " "), re.MULTILINE
    )
    assert len(lines) >= 6
    for line in lines:
        name, *rest = shlex.split(line)
        import_module(COMMANDS[name].module).parser().parse_args(rest)
    keys = re.findall(
        r"^\| `(\w+)`(?:, `(\w+)`)? \|", text.partition("### `--json`")[2].partition("### ")[0], re.MULTILINE
    )
    assert [key for pair in keys for key in pair if key] == [*KEYS]
    assert "[lengths](lengths.md)" in text
    assert all((ROOT / "docs" / target).is_file() for target in re.findall(r"\]\((\w+\.\w+)\)", text))


def test_the_entry_point_exists() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    name, _, target = config["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = target.partition(":")
    assert name == "lightning-dcp"
    assert getattr(import_module(module), function) is main


def environment() -> dict[str, str]:
    """One thread, and buffers as in a user's shell."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def python(code: str, *arguments: str) -> tuple[str, str]:
    """Output and standard error of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, env=environment(), check=False
    )
    return done.stdout.decode(), done.stderr.decode()


def test_help_loads_nothing_heavy_and_a_simulation_no_torch(files: Path) -> None:
    code = """
import contextlib, io, sys
from lightning_dcp.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main(sys.argv[1:2] + ["--help"])
light = sorted({"numpy", "matplotlib", "tqdm"} & {*sys.modules})
with contextlib.redirect_stdout(io.StringIO()):
    code = main(sys.argv[1:])
print((light, code, sorted({"torch", "lightning", "deepspeed"} & {*sys.modules})))
"""
    out, err = python(code, *words("--plot", str(files / "x.png"), "--planner", "plain"))
    assert ast.literal_eval(out) == ([], 0, []), err


def test_a_million_lengths_fit_a_gigabyte(tmp_path: Path) -> None:
    """The process' own peak; the bar goes to standard error, and standard output stays JSON."""
    lengths = np.random.default_rng(0).integers(512, 20_000, 1_000_000)
    np.save(tmp_path / "million.npy", lengths)
    code = """
import resource, sys
from lightning_dcp.cli import main
from lightning_dcp.simulate import run
run.DELAY = 0.0
code = main(sys.argv[1:])
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)
"""
    arguments = ["simulate", "--lengths", str(tmp_path / "million.npy"), "--world-size", "1024", "--json"]
    out, err = python(code, *arguments, "--global-batch-size", "2048", "--steps", "2", "--planner", "balanced")
    exit_code, megabytes = map(int, err.split()[-2:])
    assert (exit_code, json.loads(out)[0]["samples_dropped"]) == (0, 0)
    assert megabytes < 1000
    assert "\rbalanced: " in err
    assert "sample/s]" in err
    assert "\n" not in err.rstrip("\n"), "a bar that leaves nothing behind"


@pytest.mark.usefixtures("files")
def test_as_a_module_with_a_closed_pipe() -> None:
    """What head or less do to us is no error of ours."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "lightning_dcp", *words()],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=environment(),
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(closed: str) -> None:
    """Python has no stream then, and the work is done all the same."""
    command = shlex.join([sys.executable, "-m", "lightning_dcp", *words("--plans", "plans.jsonl", "--json")])
    done = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, env=environment(), check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(Path("plans.jsonl").read_text().splitlines()) == 3
    assert bool(done.stdout) == (closed == "2>&-")


@pytest.mark.usefixtures("files")
def test_names_that_the_terminal_cannot_show() -> None:
    Path("lengths.txt").rename("l\u00e4ngen.txt")
    command = [sys.executable, "-m", "lightning_dcp", *words(lengths="l\u00e4ngen.txt")]
    environ = {**environment(), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"l\\xe4ngen.txt: 60 samples")
