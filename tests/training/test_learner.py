# torch and transformers annotate themselves only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import math
import resource
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from aworld_runtime.errors import CheckpointError, ConfigError, NonFiniteLossError, TrainingError
from aworld_runtime.training.checkpoint import latest_checkpoint
from aworld_runtime.training.learner import Learner
from aworld_runtime.training.learner_config import LearnerConfig
from aworld_runtime.training.logprobs import token_logprobs
from aworld_runtime.training.packing import cut, pack, partition, prefix_order
from aworld_runtime.training.policy import PolicyModel, load_model
from aworld_runtime.training.ranks import join_ranks
from aworld_runtime.training.rows import TrainingRow, decode_rows, encode_rows
from aworld_runtime.training.step_report import TokenTerms
from tests.training.learner_rank import two_steps
from tests.training.tiny import make_rows, save_tiny_model

FLOAT32 = LearnerConfig(dtype="float32", lr=1e-2, microbatch_tokens=150, logits_chunk=7)
TWO_RANKS = FLOAT32.model_copy(update={"lr": 1e-5})
"""Adam's first steps are lr * sign(gradient): a large rate turns rounding into large differences of weights."""
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads cost more than they give at this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.named_weights()}


def assert_close(first: dict[str, Tensor], second: dict[str, Tensor], *, atol: float) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=atol, msg=name)


def on_policy(model_path: Path, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """The rows with the logprobs that an exact sampler would have recorded."""
    model = AutoModelForCausalLM.from_pretrained(model_path)
    return [
        replace(row, behavior_logprobs=tuple(full_logprobs(model, row).tolist())) for row in rows
    ]


@torch.no_grad()
def full_logprobs(model: torch.nn.Module, row: TrainingRow) -> Tensor:
    """[T] by the plain model, one row, no packing, all logits; NaN where masked."""
    ids = torch.tensor([row.token_ids])
    logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    values = torch.cat([torch.tensor([math.nan]), logprobs])
    return values.masked_fill(~torch.tensor(row.loss_mask), math.nan)


# -- packing ------------------------------------------------------------------------------------


@given(rows=st.lists(TOKENS, min_size=1, max_size=12))
def test_a_pack_gives_back_every_row(rows: list[list[int]]) -> None:
    """The keys of the block that a row's last needed token is in are the row itself."""
    ordered = [rows[index] for index in prefix_order(rows)]
    trained = [list(range(1, len(row))) for row in ordered]
    packed = pack(ordered, trained)
    assert packed.tokens <= sum(map(len, rows))
    predictors = packed.predictors[packed.unique].tolist()
    targets = packed.targets[packed.unique].tolist()
    assert targets == [token for row in ordered for token in row[1:]]
    ids = packed.input_ids[0].tolist()
    assert [ids[position] for position in predictors] == [t for row in ordered for t in row[:-1]]
    positions = packed.position_ids[0].tolist()
    assert [positions[p] for p in predictors] == [t - 1 for part in trained for t in part]


@given(rows=st.lists(TOKENS, max_size=12), parts=st.integers(1, 5))
def test_a_partition_keeps_every_row_once_and_in_order(rows: list[list[int]], parts: int) -> None:
    ordered = [rows[index] for index in prefix_order(rows)]
    runs = partition(ordered, parts)
    assert len(runs) == parts
    assert [index for run in runs for index in run] == list(range(len(rows)))


def test_runs_hold_at_most_the_given_tokens_unless_one_row_is_longer() -> None:
    rows = [[1] * 4, [1] * 4 + [2], [1] * 4 + [3], [5] * 20]
    assert [list(run) for run in cut(rows, 6)] == [[0, 1, 2], [3]]


def test_packed_logprobs_equal_the_plain_model_row_by_row(model_path: Path) -> None:
    rows = [*make_rows(), replace(repeated(make_rows()[0], 3), rollout_id="longer than one block")]
    rows = [rows[index] for index in prefix_order([row.token_ids for row in rows])]
    packed = pack([row.token_ids for row in rows], [row.trained_positions for row in rows])
    policy = PolicyModel(load_model(model_path), dtype=torch.float32, logits_chunk=5)
    logprobs, _ = policy(packed)
    plain = AutoModelForCausalLM.from_pretrained(model_path)
    wanted = torch.cat([full_logprobs(plain, row)[list(row.trained_positions)] for row in rows])
    assert packed.tokens < sum(len(row.token_ids) for row in rows) / 2
    torch.testing.assert_close(logprobs[packed.unique], wanted, rtol=0, atol=1e-5)


def test_packed_gradient_equals_the_sum_over_single_rows(model_path: Path) -> None:
    rows = make_rows()
    policy = PolicyModel(load_model(model_path), dtype=torch.float32, logits_chunk=5)

    def gradient(batches: Sequence[Sequence[TrainingRow]]) -> dict[str, Tensor]:
        policy.zero_grad()
        for batch in batches:
            packed = pack(
                [row.token_ids for row in batch], [row.trained_positions for row in batch]
            )
            policy(packed)[0][packed.unique].sum().backward()
        grads = {name: p.grad for name, p in policy.named_parameters()}
        return {name: grad.clone() for name, grad in grads.items() if grad is not None}

    assert_close(gradient([rows]), gradient([[row] for row in rows]), atol=2e-4)


# -- logits in chunks -----------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunked_logprobs_and_entropies_equal_the_full_ones(chunk: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(31, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(31, (9,))
    scale, bonus = torch.randn(2, 9, dtype=torch.float64)

    logprobs, entropies = token_logprobs(hidden, weight, targets, chunk=chunk, dtype=torch.float64)
    actual = torch.autograd.grad((logprobs * scale + entropies * bonus).sum(), [hidden, weight])
    log_p = (hidden @ weight.T).log_softmax(-1)
    full, full_entropies = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    wanted = torch.autograd.grad((full * scale + full_entropies * bonus).sum(), [hidden, weight])

    torch.testing.assert_close(logprobs, full, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropies, full_entropies, rtol=0, atol=1e-12)
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


# -- one rank -------------------------------------------------------------------------------------


def test_on_policy_the_ratio_and_the_correction_are_one(model_path: Path) -> None:
    report = Learner(model_path, FLOAT32).step(on_policy(model_path, make_rows()), policy_version=0)
    assert report.ratio_mean == 1.0
    assert report.clip_fraction == 0.0
    assert report.correction_mean == pytest.approx(1.0, abs=1e-6)
    assert report.logprob_gap == pytest.approx(0.0, abs=1e-6)
    assert report.kl == pytest.approx(0.0, abs=1e-6)


def test_on_policy_the_step_is_reinforce_by_hand(model_path: Path) -> None:
    """Gradient norm of -mean over tokens of A * logprob, by the plain model."""
    rows = on_policy(model_path, make_rows(groups=1, size=2))
    report = Learner(model_path, FLOAT32).step(rows, policy_version=0)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    loss = torch.zeros(())
    for row, advantage in zip(rows, (-half, half), strict=True):
        ids = torch.tensor([row.token_ids])
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        loss = loss - advantage * logprobs[torch.tensor(row.loss_mask[1:])].sum() / report.tokens
    loss.backward()
    norm = math.sqrt(
        sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None)
    )
    assert report.grad_norm == pytest.approx(norm, rel=1e-4)


def test_who_watches_is_told_each_token_of_each_row_whatever_the_microbatches(
    model_path: Path,
) -> None:
    rows = make_rows()
    watched: dict[str, TokenTerms] = {}
    learner = Learner(model_path, FLOAT32)
    learner.watch = lambda row, terms: watched.update({row.rollout_id: terms})
    report = learner.step(rows, policy_version=0)
    plain = AutoModelForCausalLM.from_pretrained(model_path)
    for row in rows:
        wanted = full_logprobs(plain, row)[list(row.trained_positions)].tolist()
        assert watched[row.rollout_id].logprobs == pytest.approx(wanted, abs=1e-5)
    losses = [loss * own.coefficient for own in watched.values() for loss in own.losses]
    assert sum(losses) == pytest.approx(report.loss, abs=1e-6)


def test_a_report_has_the_norm_of_each_parameters_gradient(model_path: Path) -> None:
    learner = Learner(model_path, FLOAT32.model_copy(update={"minibatch_rows": 6}))
    report = learner.step(make_rows(), policy_version=0)
    parameters = len(weights(learner))
    assert report.optimizer_steps == 2
    assert len(report.gradient_norms) == 2 * parameters
    norms = [
        math.hypot(*report.gradient_norms[start : start + parameters]) for start in (0, parameters)
    ]
    assert report.grad_norm == pytest.approx(sum(norms) / 2, rel=1e-5)


def test_repeated_steps_raise_what_was_rewarded(model_path: Path) -> None:
    rows, learner = (
        make_rows(groups=1, size=4),
        Learner(model_path, FLOAT32.model_copy(update={"lr": 1e-3})),
    )

    def rewarded() -> float:
        plain = PolicyModel(
            learner._policy.model,  # pyright: ignore[reportPrivateUsage]
            dtype=torch.float32,
            logits_chunk=64,
        )
        packed = pack([rows[2].token_ids], [rows[2].trained_positions])
        return plain(packed)[0].sum().item()

    before = rewarded()
    for version in range(5):
        learner.step(rows, policy_version=version)
    assert rewarded() > before


def test_what_masked_positions_hold_has_no_effect(model_path: Path) -> None:
    rows = make_rows()
    junk = [
        replace(
            row,
            behavior_logprobs=tuple(
                value if trained else 1e9
                for value, trained in zip(row.behavior_logprobs, row.loss_mask, strict=True)
            ),
        )
        for row in rows
    ]
    first, second = Learner(model_path, FLOAT32), Learner(model_path, FLOAT32)
    assert first.step(rows, policy_version=0).loss == second.step(junk, policy_version=0).loss
    assert_close(weights(first), weights(second), atol=0)


@pytest.mark.parametrize("tokens", [1, 100, 10_000])
def test_microbatches_of_any_size_give_the_same_step(model_path: Path, tokens: int) -> None:
    rows = make_rows()
    whole = Learner(model_path, FLOAT32.model_copy(update={"microbatch_tokens": 10_000}))
    parts = Learner(model_path, FLOAT32.model_copy(update={"microbatch_tokens": tokens}))
    first, second = (learner.step(rows, policy_version=0) for learner in (whole, parts))
    assert first.loss == pytest.approx(second.loss, abs=1e-6)
    assert first.grad_norm == pytest.approx(second.grad_norm or 0, rel=1e-5)


def test_groups_without_variance_leave_loss_and_denominator(model_path: Path) -> None:
    rows = make_rows()
    flat = [
        replace(row, group_id="flat", reward=1.0, rollout_id=f"flat-{row.rollout_id}")
        for row in rows
    ]
    first, second = Learner(model_path, FLOAT32), Learner(model_path, FLOAT32)
    report = first.step([*rows, *flat], policy_version=0)
    assert report.loss == pytest.approx(second.step(rows, policy_version=0).loss, abs=1e-6)
    assert (report.rows_dropped, report.zero_variance_groups, report.groups) == (len(flat), 1, 4)


@pytest.mark.parametrize("case", ["all masked", "all equal", "empty"])
def test_a_batch_with_nothing_to_learn_takes_no_optimizer_step(model_path: Path, case: str) -> None:
    rows = {
        "all masked": [
            replace(row, loss_mask=(False,) * len(row.loss_mask)) for row in make_rows()
        ],
        "all equal": [replace(row, reward=1.0) for row in make_rows()],
        "empty": [],
    }[case]
    learner = Learner(model_path, FLOAT32)
    before = weights(learner)
    report = learner.step(rows, policy_version=0)
    assert (report.loss, report.optimizer_steps, report.step) == (0.0, 0, 0)
    assert report.metrics["actor/optimizer_steps"] == 0
    assert "actor/grad_norm" not in report.metrics
    assert_close(weights(learner), before, atol=0)


def test_minibatches_take_a_step_each_against_the_same_old_logprobs(model_path: Path) -> None:
    learner = Learner(model_path, FLOAT32.model_copy(update={"minibatch_rows": 4}))
    report = learner.step(make_rows(), policy_version=0)
    assert report.optimizer_steps == learner.steps == 3
    assert report.ratio_mean is not None
    assert report.ratio_mean != 1.0
    assert report.clip_fraction is not None
    assert report.clip_fraction > 0


def test_kl_to_the_model_as_loaded_holds_the_policy_back(model_path: Path) -> None:
    def moved(kl_coef: float) -> float:
        config = FLOAT32.model_copy(update={"kl_coef": kl_coef, "lr": 1e-3})
        learner = Learner(model_path, config)
        for _ in range(6):
            report = learner.step(make_rows(), policy_version=0)
        reference = Learner(model_path, config.model_copy(update={"kl_coef": 1e-9}))
        reference.load(
            learner.save(model_path.parent / f"kl-{kl_coef}", policy_version=0) or Path()
        )
        report = reference.step(make_rows(), policy_version=0)
        return report.kl or 0.0

    assert 0 < moved(10.0) < moved(1e-9) / 2


@pytest.mark.parametrize("loss", ["clipped", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "rollout_mean"])
def test_every_loss_and_aggregation_takes_a_step(
    model_path: Path, loss: str, aggregation: str
) -> None:
    config = LearnerConfig.model_validate(
        {"loss": loss, "aggregation": aggregation, "dtype": "float32", "entropy_coef": 0.01}
    )
    report = Learner(model_path, config).step(make_rows(), policy_version=0)
    assert math.isfinite(report.loss)
    assert report.grad_norm is not None
    assert report.grad_norm > 0


def test_bfloat16_and_checkpointing_stay_near_float32(model_path: Path) -> None:
    exact = Learner(model_path, FLOAT32).step(make_rows(), policy_version=0)
    again = Learner(model_path, FLOAT32.model_copy(update={"gradient_checkpointing": True}))
    narrow = Learner(model_path, FLOAT32.model_copy(update={"dtype": "bfloat16"}))
    assert again.step(make_rows(), policy_version=0).grad_norm == pytest.approx(
        exact.grad_norm or 0
    )
    report = narrow.step(make_rows(), policy_version=0)
    assert report.grad_norm == pytest.approx(exact.grad_norm or 0, rel=0.05)
    assert {tensor.dtype for _, tensor in narrow.named_weights()} == {torch.float32}


def test_logprob_gap_counts_only_rows_of_the_same_version(model_path: Path) -> None:
    rows = on_policy(model_path, make_rows(groups=2))
    stale = [
        replace(row, behavior_logprobs=tuple(value - 1 for value in row.behavior_logprobs))
        for row in rows[:4]
    ]
    fresh = [replace(row, policy_version=3) for row in rows[4:]]
    report = Learner(model_path, FLOAT32).step([*stale, *fresh], policy_version=3)
    assert report.logprob_gap == pytest.approx(0.0, abs=1e-6)
    assert (report.staleness_max, report.staleness_mean) == (3, 1.5)


def test_loss_that_is_not_finite_stops_with_the_batch_saved(
    model_path: Path, tmp_path: Path
) -> None:
    learner = Learner(model_path, FLOAT32, failures=tmp_path)
    next(tensor for name, tensor in learner.named_weights() if "down_proj" in name).fill_(math.nan)
    before = weights(learner)
    with pytest.raises(NonFiniteLossError, match=r"loss=nan.*the batch is in"):
        learner.step(make_rows(), policy_version=0)
    saved = tmp_path / "step-00000001"
    assert encode_rows(decode_rows((saved / "rows.jsonl").read_bytes())) == encode_rows(make_rows())
    assert (saved / "reason.json").exists()
    for name, tensor in learner.named_weights():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


def test_weights_that_are_not_finite_stop_with_the_batch_saved(
    model_path: Path, tmp_path: Path
) -> None:
    """After an optimizer step whose loss and gradient were finite."""
    learner = Learner(model_path, FLOAT32.model_copy(update={"lr": 1e38}), failures=tmp_path)
    with pytest.raises(NonFiniteLossError, match=r"lr=1e\+38: the weights' norm became inf"):
        learner.step(make_rows(), policy_version=0)
    saved = tmp_path / "step-00000001"
    assert encode_rows(decode_rows((saved / "rows.jsonl").read_bytes())) == encode_rows(make_rows())
    assert learner.steps == 0


def test_a_batch_of_two_policies_or_from_the_future_is_refused(model_path: Path) -> None:
    rows, learner = make_rows(), Learner(model_path, FLOAT32)
    with pytest.raises(TrainingError, match="several policies"):
        learner.step([*rows, replace(rows[0], policy="other")], policy_version=0)
    with pytest.raises(TrainingError, match="policy_version=5, newer than the learner's 0"):
        learner.step([replace(rows[0], policy_version=5)], policy_version=0)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no model folder"):
        Learner(tmp_path, FLOAT32)


@pytest.mark.parametrize("knob", ["lr", "clip_high", "correction_cap", "weight_decay"])
def test_a_knob_that_is_not_finite_is_refused(knob: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){knob}.*finite number"):
        LearnerConfig.model_validate({knob: math.inf})


def test_a_knob_that_would_have_no_effect_is_refused() -> None:
    with pytest.raises(ValidationError, match="dual_clip has no part in loss='cispo'"):
        LearnerConfig(loss="cispo", dual_clip=3.0)


# -- checkpoints and export -----------------------------------------------------------------------


def test_resume_gives_the_same_next_loss_bit_for_bit(model_path: Path, tmp_path: Path) -> None:
    config = FLOAT32.model_copy(update={"warmup_steps": 5})
    first = Learner(model_path, config)
    for version in range(2):
        first.step(make_rows(seed=version), policy_version=version)
    path = first.save(tmp_path, policy_version=2, cursor={"batch": [1, 2]})
    assert path == latest_checkpoint(tmp_path)
    wanted = [first.step(make_rows(seed=seed), policy_version=seed) for seed in (2, 3)]

    second = Learner(model_path, config)
    state = second.load(path or Path())
    assert (state.step, state.policy_version, state.cursor) == (2, 2, {"batch": [1, 2]})
    resumed = [second.step(make_rows(seed=seed), policy_version=seed) for seed in (2, 3)]
    assert [(r.loss, r.grad_norm, r.lr) for r in resumed] == [
        (r.loss, r.grad_norm, r.lr) for r in wanted
    ]
    assert_close(weights(first), weights(second), atol=0)


def test_only_the_newest_checkpoints_stay_and_a_broken_one_is_named(
    model_path: Path, tmp_path: Path
) -> None:
    learner = Learner(model_path, FLOAT32)
    assert latest_checkpoint(tmp_path) is None
    for seed in range(4):
        learner.step(make_rows(seed=seed), policy_version=0)
        learner.save(tmp_path, policy_version=0, keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000003", "step-00000004"]
    (tmp_path / "step-00000004" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"step-00000004 is no checkpoint that can be read"):
        learner.load(tmp_path / "step-00000004")


@pytest.mark.parametrize("full", ["model.safetensors", "optimizer.pt"])
def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(
    model_path: Path, tmp_path: Path, full: str
) -> None:
    learner = Learner(model_path, FLOAT32)
    learner.step(make_rows(), policy_version=0)
    learner.save(tmp_path, policy_version=1)
    learner.step(make_rows(), policy_version=1)
    size = (tmp_path / "step-00000001" / full).stat().st_size
    with (
        largest_file(size - 1),
        pytest.raises(
            CheckpointError, match=r"can't write checkpoint .*step-00000002: .*File too large"
        ),
    ):
        learner.save(tmp_path, policy_version=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_disk_too_full_for_the_model_is_named(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(model_path, FLOAT32)
    with (
        largest_file(1000),
        pytest.raises(TrainingError, match=r"can't write the model to .*File too large"),
    ):
        learner.export(tmp_path / "model")


@contextmanager
def largest_file(size: int) -> Generator[None]:
    """Writing more fails, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_exported_folder_loads_in_transformers(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(model_path, FLOAT32)
    learner.step(make_rows(), policy_version=0)
    learner.export(tmp_path / "out", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_close(dict(model.named_parameters()), weights(learner), atol=0)
    assert model.config.dtype == torch.float32
    assert (tmp_path / "out" / "tokenizer.json").exists()
    learner.export(tmp_path / "narrow")
    assert {t.dtype for t in load_file(tmp_path / "narrow" / "model.safetensors").values()} == {
        torch.bfloat16
    }


def test_rows_survive_being_sent() -> None:
    rows = make_rows()
    again = decode_rows(encode_rows(rows))
    assert repr(again) == repr(rows)


# -- two ranks ------------------------------------------------------------------------------------


def run_ranks(
    folder: Path, cases: dict[str, list[TrainingRow]], model_path: Path, *, mode: str = "train"
) -> list[int]:
    """Exit codes of two rank processes that train on each batch."""
    for name, rows in cases.items():
        (folder / f"{name}.jsonl").write_bytes(encode_rows(rows))
    (folder / "config.json").write_text(TWO_RANKS.model_dump_json())
    (folder / "model").symlink_to(model_path)
    script = Path(__file__).with_name("learner_rank.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", str(folder), mode],
            stderr=subprocess.DEVNULL if mode == "die" else None,
            # As the launcher starts ranks: threads that spin would keep the cores from one another.
            env={
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "PATH": "/usr/bin:/bin",
                "OMP_WAIT_POLICY": "PASSIVE",
            },
        )
        for rank in range(2)
    ]
    try:
        return [process.wait(timeout=50) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def repeated(row: TrainingRow, times: int) -> TrainingRow:
    return replace(
        row,
        token_ids=row.token_ids * times,
        loss_mask=row.loss_mask * times,
        behavior_logprobs=row.behavior_logprobs * times,
    )


CASES = {
    "even": make_rows(),
    "uneven": [
        *make_rows(groups=1, size=2),
        *[repeated(row, 5) for row in make_rows(groups=2, size=2, seed=3)[2:]],
    ],
    "fewer rows than ranks": [
        replace(row, loss_mask=row.loss_mask if index else (False,) * len(row.loss_mask))
        for index, row in enumerate(make_rows(groups=1, size=2))
    ],
    "nothing to learn": [replace(row, reward=0.0) for row in make_rows()],
}


def test_two_ranks_give_the_step_of_one(model_path: Path, tmp_path: Path) -> None:
    """Loss, gradient and weights; batches that split unevenly, or leave a rank without rows, don't hang."""
    assert run_ranks(tmp_path, CASES, model_path) == [0, 0]
    for name, rows in CASES.items():
        first, second = (load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in range(2))
        assert_close(first, second, atol=0)
        assert_close(first, two_steps(Learner(model_path, TWO_RANKS), rows), atol=1e-6)


def test_the_death_of_a_rank_ends_the_others(model_path: Path, tmp_path: Path) -> None:
    """Long before the collective's own deadline of five minutes."""
    assert all(run_ranks(tmp_path, {"even": CASES["even"]}, model_path, mode="die"))


def test_a_rank_outside_the_world_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"rank=2 is not in 0\.\.1"),
        join_ranks(rank=2, world_size=2, init_method="file:///nowhere"),
    ):
        pass
