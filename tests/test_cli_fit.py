"""``lightning-dcp fit``, ``validate``, ``test`` and ``predict``: what may be written, what is refused, what is run."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from inspect import Parameter, signature
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml  # type: ignore[import-untyped]

from lightning_dcp import DCPCallback, DCPDataModule
from lightning_dcp.cli import COMMANDS, main
from lightning_dcp.cli.saving import SaveConfig
from lightning_dcp.planners import PLANNERS, Replay, class_path_of, create
from lightning_dcp.strategy import DCPStrategy
from tests.fitting import formula_profile
from tests.pool import Pool

ROOT = Path(__file__).parent.parent
TEXT = ROOT / "examples" / "text"
STRATEGY = "--trainer.strategy"
MODEL = ("--model", "paragraphs.TextModel")
SMALL = ("--data.max_bytes=48", "--data.global_batch_size=4")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The text example's folder as the working directory, and no variables of an earlier run."""
    monkeypatch.chdir(TEXT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return TEXT


def call(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def config(*words: str, command: str = "fit") -> dict[str, Any]:
    """The configuration that these words lead to."""
    code, out, err = call(command, *words, "--print_config")
    assert code == 0, err
    found: dict[str, Any] = yaml.safe_load(out)
    return found


def strategy(*words: str) -> dict[str, Any]:
    """Arguments of the strategy that these words lead to."""
    found = config(*MODEL, *words)["trainer"]["strategy"]
    assert found["class_path"] == "lightning_dcp.DCPStrategy"
    arguments: dict[str, Any] = found["init_args"]
    return arguments


def refusal(*words: str) -> str:
    """The sentence that these words are refused with."""
    code, out, err = call("fit", *words)
    assert code == 2
    assert out == ""
    *_, last = err.strip().splitlines()
    assert last.startswith("lightning-dcp fit: ")
    assert "Traceback" not in err
    assert len(last) < 500, "one sentence, not a page"
    return last


# --- configurations ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
@pytest.mark.feature("Command line", "strategy by class path, name, options", "over the default DCPStrategy")
def test_every_way_to_name_the_strategy_gives_the_same() -> None:
    """Lightning-AI/pytorch-lightning#19682."""
    default = strategy()
    assert default["planner"] == "balanced"
    for words in (
        (f"{STRATEGY}=lightning_dcp.DCPStrategy",),
        (f"{STRATEGY}=DCPStrategy",),
        (f"{STRATEGY}=dcp",),
        (STRATEGY, "dcp"),
        (f"{STRATEGY}.class_path=lightning_dcp.DCPStrategy",),
    ):
        assert strategy(*words) == default, words
    assert config(*MODEL, command="validate")["trainer"]["strategy"]["init_args"] == default


@pytest.mark.usefixtures("folder")
def test_every_way_to_give_it_an_option() -> None:
    expected = {**strategy(), "memory_limit": "20GB", "timeout": "0:05:00"}
    for words in (
        (f"{STRATEGY}.memory_limit=20GB", f"{STRATEGY}.timeout=0:05:00"),
        (f"{STRATEGY}.init_args.memory_limit", "20GB", f"{STRATEGY}.init_args.timeout=0:05:00"),
        (f"{STRATEGY}=dcp", f"{STRATEGY}.memory_limit=20GB", f"{STRATEGY}.timeout=0:05:00"),
    ):
        assert strategy(*words) == expected, words
    planned = strategy(f"{STRATEGY}.planner=static", f"{STRATEGY}.planner.sp_size=2", f"{STRATEGY}.sp_sizes=[1,2]")
    assert planned["planner"]["class_path"] == "lightning_dcp.planners.Static"
    assert planned["planner"]["init_args"] == {"sp_size": 2, "batch_size": 1, "deal": "longest_first"}
    assert planned["sp_sizes"] == [1, 2]
    assert strategy(f"{STRATEGY}.planner", "static")["planner"] == "static"


@pytest.mark.usefixtures("folder")
@pytest.mark.feature("Command line", "several --config files, environment, --print_config")
def test_files_environment_and_words_are_laid_over_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    nested = {"memory_limit": "48MB", "planner": "bucket", "sp_sizes": [1, 2]}
    first.write_text(yaml.safe_dump({"trainer": {"strategy": {"init_args": nested}, "max_steps": 5}}))
    second.write_text("trainer:\n  max_steps: 7\n  strategy:\n    init_args: {planner: static}\n")
    monkeypatch.setenv("PL_FIT__TRAINER__MAX_EPOCHS", "3")
    found = config(*MODEL, "-c", str(first), "--config", str(second), f"{STRATEGY}.memory_limit=0.5")
    assert (found["trainer"]["max_steps"], found["trainer"]["max_epochs"]) == (7, 3)
    arguments = found["trainer"]["strategy"]["init_args"]
    assert {key: arguments[key] for key in nested} == {
        "memory_limit": 0.5,
        "planner": "static",
        "sp_sizes": [1, 2],
    }


def _classes() -> list[type]:
    return [DCPStrategy, DCPCallback, DCPDataModule, *(_class(class_path_of(name)) for name in PLANNERS)]


def _class(path: str) -> type:
    import lightning_dcp.planners

    return getattr(lightning_dcp.planners, path.rpartition(".")[2])  # type: ignore[no-any-return]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("kind", _classes(), ids=lambda kind: kind.__name__)
def test_every_argument_has_a_type_a_default_and_a_line_of_help(kind: type) -> None:
    """Lightning-AI/pytorch-lightning#19682."""
    parameters = [p for name, p in signature(kind).parameters.items() if name != "self"]
    place = {DCPStrategy: STRATEGY, DCPCallback: "--trainer.callbacks", DCPDataModule: "--data"}.get(kind)
    home = "lightning_dcp" if place is not None else "lightning_dcp.planners"
    code, out, err = call("fit", f"{place or f'{STRATEGY}.planner'}.help={home}.{kind.__name__}")
    assert code == 0, err
    for parameter in parameters:
        assert parameter.annotation is not Parameter.empty
        assert parameter.default is not Parameter.empty or (kind, parameter.name) == (Replay, "file")
        # The help of a class inside of a class leaves the outer names out.
        assert re.search(rf"{place or '--planner'}\.{parameter.name}\b", out), parameter.name


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", [name for name in PLANNERS if name != "replay"])
def test_every_planner_is_made_from_its_class_path(name: str) -> None:
    """Lightning-AI/pytorch-lightning#19682."""
    planner = strategy(f"{STRATEGY}.planner={class_path_of(name)}")["planner"]
    made = _class(planner["class_path"])(**planner["init_args"])
    assert made == create(name)


@pytest.mark.usefixtures("folder")
def test_a_whole_number_of_batches_is_no_share_of_them(tmp_path: Path) -> None:
    """Lightning's own command line takes ``limit_val_batches=1`` for 1.0, all batches."""
    file = tmp_path / "one.yaml"
    file.write_text("trainer: {limit_train_batches: 1, limit_test_batches: 1.0}\n")
    trainer = config(*MODEL, "-c", str(file), "--trainer.limit_val_batches=1")["trainer"]
    for name, kind in (("train", int), ("val", int), ("test", float)):
        value = trainer[f"limit_{name}_batches"]
        assert value == 1
        assert type(value) is kind, name


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("file", sorted(TEXT.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_are_read(file: Path) -> None:
    """Lightning-AI/pytorch-lightning#17254."""
    found = config("--config", file.name)
    assert found["trainer"]["strategy"]["class_path"] == "lightning_dcp.DCPStrategy"
    written = yaml.safe_load(file.read_text())
    for name, value in written["trainer"]["strategy"]["init_args"].items():
        assert found["trainer"]["strategy"]["init_args"][name] == value or name == "planner", name
    again = config("--config", "text.yaml", "--config", file.name)
    assert again["trainer"]["strategy"]["init_args"]["memory_limit"] == "64MB"


def test_every_configuration_of_the_examples_is_tested() -> None:
    """The one of ``stdlib`` is that of its own command, which ``tests/test_example.py`` runs."""
    paths = [path.relative_to(ROOT / "examples") for path in (ROOT / "examples").rglob("*.yaml")]
    found = {path.as_posix() for path in paths if not {"runs", "lightning_logs"} & set(path.parts)}
    assert found == {"stdlib/config.yaml", "text/planner.yaml", "text/text.yaml"}


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            (f"{STRATEGY}.sp_sizes=1,2",),
            ("trainer.strategy.sp_sizes is '1,2'", "lists of integers such as [1, 2]"),
        ),
        ((f"{STRATEGY}.max_batsch_size=3",), ("no option 'max_batsch_size'", "did you mean 'max_batch_size'?")),
        ((f"{STRATEGY}.recompute=some",), ("trainer.strategy.recompute is 'some'", "auto, none, full")),
        ((f"{STRATEGY}.timeout=300",), ("trainer.strategy.timeout is '300'", '"0:30:00"')),
        ((f"{STRATEGY}.max_tokens=some",), ("max_tokens is 'some'", "integers and null")),
        (
            (f"{STRATEGY}.planner=static", f"{STRATEGY}.planner.sp_size=two"),
            ("trainer.strategy.planner.sp_size is 'two'", "integers"),
        ),
        ((f"{STRATEGY}.planner=best",), ("planner 'best' is unknown", "balanced, bucket")),
        ((f"{STRATEGY}.memory_limit=20 apples",), ("'20 apples'", '"80GB"')),
        ((f"{STRATEGY}.max_batch_size=0",), ("max_batch_size is 0", "integers from 1")),
        ((f"{STRATEGY}=fastest",), ("invalid strategy name", "fastest")),
        ((f"{STRATEGY}=lightning_dcp.DCP", f"{STRATEGY}.planner=static"), ("'lightning_dcp.DCP'", "no attribute")),
        (("--trainer.max_steps=many",), ("trainer.max_steps is 'many'", "integers")),
        (("--trainer.max_stepps=3",), ("no option 'trainer.max_stepps'", "'trainer.max_steps'")),
        (("--devices=2",), ("no option 'devices'", "did you mean 'trainer.devices'?")),
        (("--model=nothing.Model",), ("model is 'nothing.Model'", "No module named 'nothing'")),
        (("--model=paragraphs.Model",), ("paragraphs.Model", "no attribute 'Model'")),
        (("--model=Modell",), ("model is 'Modell'", "class path")),
        (("--data.global_batch_size=0",), ("global_batch_size is 0",)),
        (("--config=nothing.yaml",), ("nothing.yaml", "does not exist")),
        (("--trainer.precision=64-true",), ("64-true", "32-true")),
    ],
)
def test_wrong_values_are_refused_in_a_sentence(words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    """Lightning-AI/pytorch-lightning#17254."""
    said = refusal(*MODEL, "--data=paragraphs.Paragraphs", "--trainer.accelerator=cpu", *words)
    for part in parts:
        assert part in said


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("trainer: {strategy: [1, 2]}", ("trainer.strategy is '[1, 2]'", "class path")),
        ("trainer: {strategy: [{class_path: lightning_dcp.DCPStrategy}]}", ("trainer.strategy is", "class_path")),
        ("trainer: {strategy: {class_path: dcp}}", ("trainer.strategy is 'dcp'", "class path")),
        (
            "trainer: {strategy: {class_path: lightning_dcp.DCPStrategy, init_args: {planer: static}}}",
            ("no option 'planer'", "did you mean 'planner'?"),
        ),
        ("trainer: {strategi: dcp}", ("no option 'trainer.strategi'", "'trainer.strategy'")),
        ("trainer: [", ("config",)),
    ],
)
def test_wrong_forms_in_a_file_are_refused_in_a_sentence(
    text: str, parts: tuple[str, ...], tmp_path: Path
) -> None:
    """Lightning-AI/pytorch-lightning#17254."""
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    said = refusal(*MODEL, "-c", str(file))
    for part in parts:
        assert part in said


@pytest.mark.usefixtures("folder")
def test_files_of_another_kind_are_refused_in_a_sentence(tmp_path: Path) -> None:
    empty, latin, text = (tmp_path / name for name in ("empty.yaml", "latin.yaml", "text.ckpt"))
    empty.write_text("")
    latin.write_bytes("seed_everything: 1  # für".encode("latin-1"))
    text.write_text("# no checkpoint\n")
    given = (*MODEL, "--data", "paragraphs.Paragraphs", *SMALL)
    assert "a --config file is empty" in refusal("--config", str(empty))
    assert "no text in UTF-8" in refusal("--config", str(latin))
    assert "does not exist" in refusal(*given, "--dry-run", "--dry-run-picture", str(tmp_path / "none" / "a.png"))
    assert "ckpt_path names no whole checkpoint" in refusal(*given, "--ckpt_path", str(text))


@pytest.mark.usefixtures("folder")
def test_what_is_missing_is_named() -> None:
    assert "model must be given" in refusal()


BROKEN = """
import lightning as L
import {module}

class Model(L.LightningModule):
    def __init__(self, x: int = 1) -> None:
        super().__init__()
        raise ValueError("the user's own")
"""


def test_errors_of_user_code_keep_their_traceback(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "broken_import.py").write_text(BROKEN.format(module="nothing_of_this_name"))
    (tmp_path / "broken_model.py").write_text(BROKEN.format(module="math"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        call("fit", "--model=broken_import.Model")
    with pytest.raises(ValueError, match="the user's own") as caught:
        call("fit", "--model=broken_model.Model")
    assert caught.traceback[-1].path == tmp_path / "broken_model.py"


# --- documentation ----------------------------------------------------------------------------------------------


def test_commands_stand_in_the_order_of_their_use() -> None:
    """``tests/test_cli.py`` shows that ``--help`` imports nothing heavy."""
    _, out, _ = call("--help")
    names = [line.split()[0] for line in out.splitlines() if line.startswith("    ") and line[4] != " "]
    assert names == [*COMMANDS]
    assert list(COMMANDS) == ["fit", "validate", "test", "predict", "audit", "simulate"]


@pytest.mark.usefixtures("folder")
def test_the_documentation_says_what_works(tmp_path: Path) -> None:
    """Every configuration is read, every command is accepted, and the refusal is the one that is shown."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "docs" / "cli.md").read_text(), re.DOTALL | re.MULTILINE)
    files = [text for kind, text in blocks if kind == "yaml"]
    assert len(files) == 2
    for text in files:
        file = tmp_path / "shown.yaml"
        file.write_text(text)
        found = config(*MODEL, "-c", str(file))["trainer"]["strategy"]["init_args"]
        for name, value in yaml.safe_load(text)["trainer"]["strategy"]["init_args"].items():
            assert found[name] == value or name == "planner"
    texts = "\n".join(text for kind, text in blocks if not kind)
    lines = re.findall(r"^(?:\$ )?lightning-dcp fit (?!.*max_batsch)(.*--\w.*)$", texts, re.MULTILINE)
    lines = [line for line in lines if not line.startswith(" ")]
    assert len(lines) == 4
    for line in lines:
        config(*shlex.split(line.replace("...", " ".join(MODEL))))
    ((words, answer),) = re.findall(r"^\$ lightning-dcp fit (.*max_batsch.*)\n(.*)$", texts, re.MULTILINE)
    assert refusal(*shlex.split(words)) == answer


# --- runs -------------------------------------------------------------------------------------------------------


def _words(folder: str, **settings: Any) -> list[str]:
    """A small run of two steps that measures nothing."""
    base = {
        "config": "text.yaml",
        "model": "tests.cli_models.Evaluated",
        "data": "tests.cli_models.Few",
        "data.max_bytes": 48,
        "data.global_batch_size": 8,
        "trainer.devices": dist.get_world_size(),
        "trainer.max_steps": 2,
        "trainer.default_root_dir": folder,
        "trainer.logger": "lightning.pytorch.loggers.CSVLogger",
        "trainer.logger.save_dir": folder,
        "trainer.logger.version": "the-same",
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        "trainer.strategy.profile": f"{folder}/profile.json",
        "trainer.strategy.self_check": "false",
    }
    return [f"--{name}={value}" for name, value in {**base, **settings}.items()]


@contextmanager
def _in_example() -> Iterator[None]:
    before = os.getcwd(), list(sys.path)
    os.chdir(TEXT)
    try:
        yield
    finally:
        os.chdir(before[0])
        sys.path[:] = before[1]


def _all_commands(folder: str) -> dict[str, Any]:
    """Fit twice into one folder, resume with other settings, then the other commands; called by every rank."""
    out: dict[str, Any] = {}
    with _in_example():
        written: list[int] = []
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(SaveConfig, "save_config", lambda *_: written.append(dist.get_rank()))
        out["fit"] = call("fit", *_words(folder))[0]
        out["written"] = list(written)
        first = sorted(Path(folder).rglob("*.ckpt"))
        out["again"] = call("fit", *_words(folder, **{"data.global_batch_size": 4}))[0]
        monkeypatch.undo()
        model = importlib.import_module("paragraphs").TextModel.load_from_checkpoint(first[0], weights_only=True)
        out["preset"] = model.hparams["preset"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            more = {"trainer.max_steps": 3, "ckpt_path": first[0], "trainer.strategy.max_step_factor": 3}
            out["resumed"] = call("fit", *_words(folder, **more, **{"trainer.strategy.planner": "static"}))[0]
        out["warnings"] = [str(w.message) for w in caught if "other settings" in str(w.message)]
        for command in ("validate", "test", "predict"):
            words = [w for w in _words(folder, ckpt_path=first[0]) if not w.startswith("--config")]
            out[command] = call(command, *words, "--trainer.accelerator=cpu")[0]
    return out


@pytest.mark.feature("Command line", "fit, validate, test, predict", "on several ranks, with --ckpt_path")
def test_all_commands_on_two_ranks(pool: Pool, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#19754, #20068, #20310."""
    (tmp_path / "profile.json").write_text(formula_profile(2, (4,)).to_json())
    found = pool.run(_all_commands, 2, str(tmp_path), timeout=240.0)
    for rank, out in enumerate(found):
        commands = ("fit", "again", "resumed", "validate", "test", "predict")
        assert [out[name] for name in commands] == [0] * len(commands)
        assert out["written"] == ([0] if rank == 0 else [])
        assert out["preset"] == "bytes-1d"
    (warning,) = found[0]["warnings"]
    for part in ("planner: balanced / static", "max_step_factor: None / 3.0"):
        assert part in warning
    (saved,) = tmp_path.rglob("config*.yaml")
    assert saved.name == "config.yaml"
    assert yaml.safe_load(saved.read_text())["data"]["init_args"]["global_batch_size"] == 8, "of the last fit"
    checkpoint = max(tmp_path.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    content = torch.load(checkpoint, weights_only=True)  # refuses all but plain values
    assert content["hyper_parameters"]["_class_path"] == "tests.cli_models.Evaluated"
    assert content["lightning_dcp"]["settings"]["planner"] == "static"


def _other_examples(folder: str) -> dict[str, Any]:
    """The example of planner options, and data that are no DCPDataModule."""
    out: dict[str, Any] = {}
    with _in_example():
        words = ["--config=planner.yaml", "--data.max_bytes=64", "--trainer.max_steps=2"]
        words += [f"--trainer.default_root_dir={folder}", f"--trainer.strategy.profile={folder}/profile.json"]
        words += [f"--trainer.callbacks.plans_file={folder}/plans.jsonl", "--trainer.limit_val_batches=0"]
        out["planner"] = call("fit", *words, "--trainer.enable_progress_bar=false")[0]
        plain = [w for w in _words(folder, data="tests.cli_models.Plain") if not w.startswith("--data.")]
        config = next(w for w in plain if w.startswith("--config"))
        plain.remove(config)
        plain += ["--trainer.accelerator=cpu", "--optimizer=SGD", "--optimizer.lr=0.1"]
        out["plain"] = call("fit", *plain)[0]
        out["dry"] = call("fit", *plain, "--dry-run")[:2]
    return out


def test_planner_options_and_a_plain_loader_train(pool: Pool, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#17254; the example of a whole configuration is used by the other tests."""
    (tmp_path / "profile.json").write_text(formula_profile(2, (4,)).to_json())
    first, second = pool.run(_other_examples, 2, str(tmp_path), timeout=120.0)
    for out in (first, second):
        assert (out["planner"], out["plain"], out["dry"][0]) == (0, 0, 0)
    assert len((tmp_path / "plans.jsonl").read_text().splitlines()) == 2
    assert "24 samples, 402 tokens, 3 steps" in first["dry"][1]


def _own_file_and_errors(folder: str) -> tuple[list[str], str, tuple[int, str]]:
    """Runs without a logger in a folder with the user's own config.yaml; then two that fail in his code."""
    frames: list[str] = []
    with _in_example():
        words = [word for word in _words(folder, model="tests.cli_models.Broken") if "logger" not in word]
        words.append("--trainer.logger=false")
        assert call("fit", *words, "--trainer.max_steps=1")[0] == 0
        assert call("fit", *words, "--trainer.max_steps=1")[0] == 0
        with pytest.raises(ValueError, match="the user's own") as caught:
            call("fit", *words)
        frames += [entry.name for entry in caught.traceback if Path(entry.path).name == "cli_models.py"]
        code, _, err = call("fit", *words, "--model.late=false", "--trainer.strategy.self_check=true")
    return frames, str(caught.value), (code, err.splitlines()[-1])


def test_a_file_of_the_user_stays_and_his_errors_do(pool: Pool, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#19754: re-runs do not fail, and replace nothing that they did not write."""
    (tmp_path / "profile.json").write_text(formula_profile(1, (4,)).to_json())
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    ((frames, error, (code, sentence)),) = pool.run(_own_file_and_errors, 1, str(tmp_path), timeout=120.0)
    assert (frames, error) == (["training_step"], "the user's own")
    assert code == 2, "an error in the self-check is told by it"
    assert re.search(r"raised ValueError: the user's own \(cli_models.py, line \d+\)", sentence)
    assert (tmp_path / "config.yaml").read_text() == "mine: 1\n"
    assert sorted(path.name for path in tmp_path.glob("*.yaml")) == ["config-1.yaml", "config.yaml"]


@pytest.mark.launch
@pytest.mark.feature("Command line", "several processes by Lightning's launcher")
def test_processes_are_launched(tmp_path: Path) -> None:
    """The launcher starts the command again for each rank; under torchrun they are there, as in the pool."""
    (tmp_path / "profile.json").write_text(formula_profile(2, (4,)).to_json())
    settings = {
        **{"config": "text.yaml", "trainer.devices": 2, "trainer.fast_dev_run": 1, "data.max_bytes": 32},
        **{"trainer.strategy.profile": tmp_path / "profile.json", "trainer.strategy.self_check": "false"},
        **{"trainer.default_root_dir": tmp_path, "trainer.limit_val_batches": 0},
    }
    words = [f"--{name}={value}" for name, value in settings.items()]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_dcp", "fit", *words],
        cwd=TEXT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "MEMBER: 2/2" in done.stdout + done.stderr
    assert "`Trainer.fit` stopped: `max_steps=1` reached." in done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.json"]
