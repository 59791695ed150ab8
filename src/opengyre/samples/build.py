"""From trees and rewards to samples, and from samples to micro-steps.

    Tree + roles ── select ──▶ picks ── build_samples ──▶ Sample, …  (one execution, weights 1/N_e)
    group of executions ── build_group ──▶ GroupSamples ── pack_micro_steps ──▶ micro-steps under a token budget

Weights are fixed here, before packing: no split of samples over micro-steps or cells changes an execution's voice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec
import numpy as np

from opengyre.record.types import Role, Span
from opengyre.samples.advantage import GroupAdvantage, Kind, group_advantage
from opengyre.samples.select import PathTree, Pick, Picker, by_priority, paths_of, select
from opengyre.samples.types import Sample


class Member(msgspec.Struct, frozen=True):
    """One finished execution of a group. ``reward`` is None when it was not scored."""

    execution_id: str
    tree: PathTree
    roles: Mapping[int, Role]
    reward: float | None


class GroupSamples(msgspec.Struct, frozen=True):
    """All samples of one query, with the statistics of its group. A degenerate group has no samples."""

    query_id: str
    samples: list[Sample]
    advantage: GroupAdvantage


def build_group(
    query_id: str,
    members: Sequence[Member],
    *,
    kind: Kind = "std",
    min_valid: int = 2,
    j_max: int = 5,
    run_seed: int = 0,
    picker: Picker = by_priority,
) -> GroupSamples:
    """Turn a query's finished executions into samples.

    Executions without a reward give neither samples nor a baseline; a group that cannot rank its executions gives no
    samples and says why in ``advantage.degenerate``.
    """
    group = group_advantage([m.reward for m in members], kind, min_valid=min_valid)
    samples: list[Sample] = []
    for member, advantage in zip(members, group.advantages, strict=True):
        if advantage is None or group.degenerate is not None:
            continue
        samples += build_samples(
            member.tree,
            member.roles,
            execution_id=member.execution_id,
            query_id=query_id,
            advantage=advantage,
            j_max=j_max,
            run_seed=run_seed,
            picker=picker,
        )
    return GroupSamples(query_id, samples, group)


def build_samples(
    tree: PathTree,
    roles: Mapping[int, Role],
    *,
    execution_id: str,
    query_id: str,
    advantage: float,
    j_max: int = 5,
    run_seed: int = 0,
    picker: Picker = by_priority,
) -> list[Sample]:
    """The samples of one execution, at most ``j_max``, together of weight N_e * (1/N_e) = 1.

    ``ids`` are the recorded ids of the whole path; ``mask`` is True on this sample's own trainable tokens; ``logprobs``
    are the recorded ones on every sampled token of the path and NaN elsewhere.
    """
    picks = select(paths_of(tree, roles), j_max=j_max, run_seed=run_seed, execution_id=execution_id, picker=picker)
    return list(samples_of(tree, picks, execution_id=execution_id, query_id=query_id, advantage=advantage))


def samples_of(
    tree: PathTree, picks: Sequence[Pick], *, execution_id: str, query_id: str, advantage: float
) -> Iterator[Sample]:
    """The samples of the paths that were picked, one at a time: a path of a million tokens is in memory once."""
    trained = {key for pick in picks for key in pick.trainable}  # no key is in two picks
    tokens = {segment.key: segment.tokens for pick in picks for segment in pick.path.segments}
    total = sum(tokens[key] for key in trained)
    for pick in picks:
        path, mask = list(tree.path(pick.leaf)), _mask(pick)
        versions = list(_versions(mask, path))
        yield Sample(
            sample_id=f"{execution_id}/{pick.leaf}",
            execution_id=execution_id,
            query_id=query_id,
            role=pick.path.role,
            ids=np.concatenate([span.ids for *_, span in path]),
            mask=mask,
            logprobs=np.concatenate([_logprobs(span) for *_, span in path]),
            advantage=advantage,
            weight=1.0 / total,
            oldest_version=min(versions),
            newest_version=max(versions),
            segments=_segments(path),
        )


def _mask(pick: Pick) -> np.ndarray:
    """Shape (T,), True on the segments this pick trains; the path's first token is never among them."""
    fresh = set(pick.trainable)
    lengths = [stop - start for _, start, stop in (segment.key for segment in pick.path.segments)]
    mask = np.repeat([segment.key in fresh for segment in pick.path.segments], lengths)
    mask[:1] = False
    return mask


def _logprobs(span: Span) -> np.ndarray:
    return np.full(len(span), np.nan, dtype=np.float32) if span.logprobs is None else span.logprobs


def _versions(mask: np.ndarray, path: Sequence[tuple[int, int, int, Span]]) -> Iterator[int]:
    position = 0
    for *_, span in path:
        if span.version is not None and bool(mask[position : position + len(span)].any()):
            yield span.version
        position += len(span)


def _segments(path: Sequence[tuple[int, int, int, Span]]) -> tuple[tuple[int, int], ...]:
    """(node id, tokens) along the path; the spans of one node are one segment."""
    return tuple((node, sum(b - a for _, a, b, _ in run)) for node, run in groupby(path, key=lambda piece: piece[0]))


def unique_tokens(samples: Sequence[Sample]) -> int:
    """Tokens of the prefix tree that one execution's samples span: what a packing trainer computes.

    Two samples share exactly the nodes (and the shorter of their stretches of the first node in which they part) that
    lead both their paths.
    """
    total = 0
    previous: tuple[tuple[int, int], ...] = ()
    for sample in sorted(samples, key=lambda s: s.segments):
        shared = 0
        for (node, length), (before, other) in zip(sample.segments, previous, strict=False):
            if node != before:
                break
            shared += min(length, other)
            if length != other:
                break
        total += len(sample.ids) - shared
        previous = sample.segments
    return total


def pack_micro_steps(
    samples: Sequence[Sample], budget: int, *, shared_prefix: bool = False, row: int | None = None
) -> list[list[Sample]]:
    """Split samples into micro-steps of at most ``budget`` tokens, deterministic in the order given.

    An execution's samples stay together, ordered by path, while they fit; then whole executions fill the first
    micro-step with room. A sample longer than the budget is never cut, for a cut trajectory has another sequence ratio.
    ``shared_prefix``: the trainer computes a shared prefix once, so it counts once. ``row``: it can also compute a row
    of so many tokens in windows of the budget; samples whose common prefix costs more than that stay together.
    """

    def cost(some: Sequence[Sample]) -> int:
        return unique_tokens(some) if shared_prefix else sum(len(s.ids) for s in some)

    def together(piece: list[Sample], sample: Sample) -> bool:
        used, joined = cost(piece), cost([*piece, sample])
        return joined <= budget or (row is not None and joined <= row and windows_pay(used, joined, sample, budget))

    bins: list[tuple[int, list[Sample]]] = []
    by_execution: dict[str, list[Sample]] = {}
    for sample in samples:
        by_execution.setdefault(sample.execution_id, []).append(sample)
    for own in by_execution.values():
        for piece in _pieces(sorted(own, key=lambda s: s.segments), together):
            tokens = cost(piece)
            place = next((i for i, (used, _) in enumerate(bins) if used + tokens <= budget), None)
            if place is None:
                bins.append((tokens, piece))
            else:
                used, there = bins[place]
                bins[place] = (used + tokens, there + piece)
    return [inside for _, inside in bins]


def windows_pay(used: int, joined: int, sample: Sample, budget: int) -> bool:
    """True if ``sample`` had better join a row of ``used`` tokens, which has ``joined`` then, than get one of its own.

    A row over the budget runs its forward pass twice; a row of its own computes the shared prefix again, forward and
    backward, three times a forward's work.
    """
    shared = used + len(sample.ids) - joined
    twice = joined - used if used > budget else joined
    return 3 * shared > twice


def _pieces(samples: Sequence[Sample], together: Callable[[list[Sample], Sample], bool]) -> Iterator[list[Sample]]:
    """Neighbouring samples as long as they had better stay together."""
    piece: list[Sample] = []
    for sample in samples:
        if piece and not together(piece, sample):
            yield piece
            piece = []
        piece.append(sample)
    if piece:
        yield piece
