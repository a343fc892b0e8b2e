"""One sentence for each benchmark, computed from its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.reporting import Row, median


def span(values: Iterable[float], digits: int = 2) -> str:
    """Format the range of ratios: `0.24 to 1.09`, or one number if both are equal."""
    numbers = sorted(values)
    low, high = f"{numbers[0]:.{digits}f}", f"{numbers[-1]:.{digits}f}"
    return low if low == high else f"{low} to {high}"


def percent(values: Iterable[float]) -> str:
    """Format the range of ratios in percent: `24 to 52 %`."""
    return f"{span((100 * value for value in values), 0)} %"


def of(rows: Sequence[Row], column: str, **wanted: str) -> list[float]:
    """Return a column's numbers from the rows whose other columns contain the texts in `wanted`."""
    return [
        row[column]
        for row in rows
        if isinstance(row[column], float) and all(text in str(row[name]) for name, text in wanted.items())
    ]


def load(rows: Sequence[Row]) -> str:
    dense = [row["ours / transformers"] for row in rows if row["checkpoint"].startswith("dense")]
    experts = [row["ours / transformers"] for row in rows if not row["checkpoint"].startswith("dense")]
    return f"MoE checkpoints load in {percent(experts)} of transformers' time, dense ones in {percent(dense)}."


def many_keys(rows: Sequence[Row]) -> str:
    loading, saving = (of(rows, "ours / transformers", what=what) for what in ("load", "save"))
    return (
        f"For 45,395 tensors, loading takes {percent(loading)} and saving {percent(saving)} of transformers' CPU time."
    )


def load_sharded(rows: Sequence[Row]) -> str:
    dense = of(rows, "with first forward, ours / transformers", checkpoint="dense")
    experts = of(rows, "with first forward, ours / transformers", checkpoint="Mixtral")
    return (
        f"On two ranks, loading and the first forward take {percent(dense)} of transformers' time for a dense model, "
        f"and {percent(experts)} for a MoE model."
    )


def save(rows: Sequence[Row]) -> str:
    regular, resume = (of(rows, "with fsync / peer", what=name) for name in ("save_pretrained", "save_checkpoint"))
    return (
        f"With fsync, `save_pretrained` takes {span(regular)} times transformers' time, and `save_checkpoint` "
        f"{span(resume)} times that of `torch.save`. Both baselines run without fsync."
    )


def save_resume(rows: Sequence[Row]) -> str:
    ratio = "complete / DCP `save`"
    saving = [row[ratio] for row in rows if row["call"] == "`save_checkpoint`"]
    large = [row for row in rows if row["after kills: lost"] is not None]
    stops = of(large, "returns, s", call="`save_checkpoint(wait=False)`")
    theirs = of(large, "returns, s", call="DCP `async_save`")
    peers = [row for row in large if "DCP" in row["call"]]
    lost = sum(row["after kills: lost"] for row in peers)
    kills = sum(row[f"after kills: {each}"] for row in peers for each in ("old", "new", "lost"))
    return (
        f"`save_checkpoint` takes {span(saving)} times the time of DCP's `save`. With `wait=False`, training continues "
        f"after {span(stops)} s (DCP's `async_save`: {span(theirs)} s). After a killed save, the previous or the new "
        f"checkpoint of nrl_models loads in every case. With DCP, {lost} of {kills} killed saves lost the "
        "checkpoint that they overwrote."
    )


def import_time(rows: Sequence[Row]) -> str:
    seconds = {row["command"]: row["seconds"] for row in rows}
    return (
        f"`import nrl_models` takes {1000 * seconds['import nrl_models']:.0f} ms, `nrl-models --help` "
        f"{1000 * seconds['nrl-models --help']:.0f} ms, and `import torch` {1000 * seconds['import torch']:,.0f} ms."
    )


def memory(rows: Sequence[Row]) -> str:
    loads, saves, resumes, steps = (
        of(rows, "peak / model", call=call)
        for call in ("load, bf16", "`save_pretrained`", "`save_checkpoint`", "RL step")
    )
    theirs = of(rows, "peer's peak / model", call="RL step")
    return (
        f"In addition to the model, loading needs {percent(loads)} of the model's size, and `save_pretrained` "
        f"{percent(saves)}. `save_checkpoint` needs {percent(resumes)} of the training state's size. An RL step with "
        f"all rollouts at once needs {percent(steps)} of the model's size; transformers, with one rollout at a time, "
        f"needs {percent(theirs)}."
    )


def combine(rows: Sequence[Row]) -> str:
    ratios = [x for name in ("decode 1 token", "prefill 512", "train 4 x 128") for x in of(rows, name)]
    return f"Fused projections take {span(ratios)} times the time of separate ones."


def decode(rows: Sequence[Row]) -> str:
    fused, again = ([1 / x for x in of(rows, name)] for name in ("combined / transformers", AGAIN))
    noise = f"a second run of transformers takes {span(again)} times the time of the first"
    return f"Decoding takes {span(fused)} times transformers' time; {noise}."


AGAIN = "transformers again / transformers"


def logprobs(rows: Sequence[Row]) -> str:
    memory = of(rows, "memory, ratio", way="nrl_models")
    known = of(rows, "time, ratio", way="nrl_models, loss")
    other = [row["time, ratio"] for row in rows if row["way"] == "nrl_models"]
    return (
        f"`token_logprobs` needs {percent(memory)} of the memory of full logits. With `loss=...`, it takes "
        f"{span(known)} times their time; without `loss=...`, {span(other)} times."
    )


def refit(rows: Sequence[Row]) -> str:
    ratios = {row["way"]: row["ratio"] for row in rows}
    (bucketed,) = (name for name in ratios if name.startswith("iter_export,"))
    size = bucketed.removeprefix("iter_export, ").removesuffix(" at a time")
    return (
        f"`iter_export` takes {ratios['iter_export']:.2f} times as long as one copy of the weights, "
        f"and {ratios[bucketed]:.1f} times as long in buckets of {size}."
    )


def refit_engine(rows: Sequence[Row]) -> str:
    times = {row["way"]: row["time / vLLM's reload"] for row in rows}
    return (
        f"A complete refit takes {times['in process']:.2f} times as long as vLLM's own reload of the same tensors in "
        f"process, {times['subprocess']:.1f} times in a subprocess, and {times['HTTP, all changed']:.1f} times over "
        f"HTTP. If no weight has changed, HTTP takes {times['HTTP, unchanged']:.1f} times as long."
    )


def train_step(rows: Sequence[Row]) -> str:
    ratios = of(rows, "time, ratio", model="combined")
    return (
        f"A training step with fused projections takes {span(ratios)} times the time of transformers' step. "
        "With FSDP2, the baseline is nrl_models with separate projections."
    )


def rl_step(rows: Sequence[Row]) -> str:
    shared = [row for row in rows if "shared prompt" in str(row.get("shape"))]
    others = [row for row in rows if row not in shared]
    time, memory = (of(others, name, way="ours, packed") for name in ("time, ratio", "memory, ratio"))
    once = f" ({percent(of(shared, 'time, ratio', way='ours, packed'))} if 8 rollouts share a prompt)" if shared else ""
    return (
        f"TRL runs transformers with one padded rollout at a time. Compared with that, `rollout_logprobs` takes "
        f"{percent(time)} of the time{once} and {span(memory)} times the memory."
    )


def onboarding(rows: Sequence[Row]) -> str:
    done = sum(row["family complete"] == "yes" for row in rows)
    return (
        f"`nrl-models new` takes {median(rows, 'seconds'):.0f} s (median), with generated tests; {done} of {len(rows)} "
        "generated families were complete."
    )


def watch(rows: Sequence[Row]) -> str:
    (alone,) = (row["in watch, %"] for row in rows if row["step"] == "watch")
    (full,) = (row["in watch, %"] for row in rows if row["step"] == "watch, digests and probes")
    return f"`nrl_models.watch` takes {alone:.1f} % of a step's CPU time without probes, and {full:.1f} % with them."


CONCLUSIONS: dict[str, Callable[[Sequence[Row]], str]] = {
    function.__name__: function
    for function in (
        *(load, many_keys, load_sharded, save, save_resume, memory, import_time, combine),
        *(decode, logprobs, refit, refit_engine, train_step, rl_step, watch, onboarding),
    )
}
"""The sentence of each benchmark, by its name."""
