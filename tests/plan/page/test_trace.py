"""Traces of plans, read back: tracks, nested slices, counters, flows, and how long the step takes."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from timed_plans import H100, LAYERS, TIMED, offloading, ran, step_in_a_loop, step_of_layers

import sdy_jax as sdy
from sdy_jax.cli.main import main
from sdy_jax.errors import SdyError
from sdy_jax.plan.page.trace import trace_json
from sdy_jax.plan.record.record import PlanRecord

Event = dict[str, Any]
IN_SECONDS = [name for name in TIMED if "bytes" not in name]
REQUIRED = {"X": {"name", "cat", "ts", "dur", "pid", "tid", "args"}, "M": {"name", "pid", "tid", "args"}}
REQUIRED |= {"C": {"name", "ts", "pid", "args"}}
REQUIRED |= {kind: {"name", "cat", "id", "ts", "pid", "tid"} for kind in "stf"}
"""What the format asks of events of each kind."""

NOTHING, NANOSECOND = 1e-5, 1e-3
"""Microseconds that rounded times may differ by."""


@cache
def record_of(name: str) -> PlanRecord:
    return TIMED[name]().record()


@cache
def events_of(name: str) -> list[Event]:
    return json.loads(trace_json(record_of(name)))["traceEvents"]  # type: ignore[no-any-return]


def slices(events: list[Event]) -> dict[int, list[Event]]:
    """The complete events by their threads, as viewers sort them: by time, longer ones first, else as they come."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["tid"]].append(event)
    return {tid: sorted(each, key=lambda event: (event["ts"], -event["dur"])) for tid, each in found.items()}


def threads(events: list[Event]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


@pytest.mark.parametrize("name", IN_SECONDS)
def test_events_have_what_the_format_asks_for(name: str) -> None:
    for event in events_of(name):
        assert set(event) >= REQUIRED[event["ph"]], event
        assert event["pid"] == 1 and event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        assert all(isinstance(value, (str, int, float, bool)) for value in event.get("args", {}).values())


@pytest.mark.parametrize("name", IN_SECONDS)
def test_slices_of_a_track_nest(name: str) -> None:
    """Of any two one holds the other, or they do not overlap: else viewers drop them."""
    for of_thread in slices(events_of(name)).values():
        around = list[Event]()
        for event in of_thread:
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"] + NOTHING:
                around.pop()
            if around:
                assert event["ts"] + event["dur"] <= around[-1]["ts"] + around[-1]["dur"] + NOTHING
            around.append(event)


@pytest.mark.parametrize("name", IN_SECONDS)
def test_ends_of_slices_add_up_to_the_beginnings_of_the_next_without_rounding(name: str) -> None:
    """Viewers that add times find what a slice is in by its end: speedscope does."""
    for of_thread in slices(events_of(name)).values():
        around = list[float]()
        for event in of_thread:
            around = [end for end in around if end > event["ts"]]
            around.append(event["ts"] + event["dur"])
            assert around == sorted(around, reverse=True)


@pytest.mark.parametrize("name", IN_SECONDS)
def test_tracks_have_names_and_take_as_long_as_the_plan_says(name: str) -> None:
    events, time = events_of(name), record_of(name).time
    named, of_thread = threads(events), slices(events)
    assert set(of_thread) <= set(named) and named[1] == "compute"
    leaves = [event for event in of_thread[1] if event["cat"] not in ("scope", "loop")]
    assert sum(event["dur"] for event in leaves) == pytest.approx(1e6 * time.total, abs=1.01 * NANOSECOND)
    assert max(event["ts"] + event["dur"] for event in leaves) == pytest.approx(1e6 * time.total, abs=1.01 * NANOSECOND)
    links = [event for thread, each in of_thread.items() if thread != 1 for event in each]
    assert all("links of" in named[thread] for thread in of_thread if thread != 1)
    rounded = NANOSECOND * len(links)
    assert sum(event["dur"] for event in links) == pytest.approx(1e6 * time.communication, abs=rounded)
    hidden = sum(event["dur"] for event in links if event["cat"] == "hidden")
    assert hidden == pytest.approx(1e6 * time.hidden, abs=rounded)


@pytest.mark.parametrize("name", IN_SECONDS)
def test_times_are_whole_nanoseconds_and_none_is_a_moment(name: str) -> None:
    """Perfetto keeps no parts of a nanosecond, and would drop slices that overlap by one; moments it piles up."""
    for event in (event for of_thread in slices(events_of(name)).values() for event in of_thread):
        for time in (event["ts"], event["dur"]):
            assert 1e3 * time == pytest.approx(round(1e3 * time), abs=0.002)
        assert event["dur"] > 0


@pytest.mark.parametrize("name", IN_SECONDS)
def test_the_counter_of_memory_has_its_peak_on_the_same_axis(name: str) -> None:
    memory, events = record_of(name).memory, events_of(name)
    assert memory is not None
    counted = [event for event in events if event["ph"] == "C" and event["name"] == "memory (bytes)"]
    assert max(sum(event["args"].values()) for event in counted) == pytest.approx(memory.peak, rel=0.02)
    assert all(event["ts"] <= 1e6 * record_of(name).time.total + NANOSECOND for event in counted)
    limits = [event["args"]["limit"] for event in events if event["ph"] == "C" and event["name"] != "memory (bytes)"]
    assert set(limits) == ({memory.available} if memory.available else set())


@pytest.mark.parametrize("name", IN_SECONDS)
def test_flows_begin_and_end_in_slices(name: str) -> None:
    events = events_of(name)
    of_thread, flows = slices(events), defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    for each in flows.values():
        kinds = [event["ph"] for event in each]
        assert kinds[0] == "s" and kinds[-1] == "f" and set(kinds[1:-1]) <= {"t"} and len(kinds) > 1
        assert all(one["ts"] <= other["ts"] for one, other in pairwise(each))
        for event in each:
            assert any(
                s["ts"] - NOTHING <= event["ts"] <= s["ts"] + s["dur"] + NOTHING for s in of_thread[event["tid"]]
            )


def test_a_flow_leads_from_the_maker_through_the_collective_to_its_user() -> None:
    events, record = events_of("rings"), record_of("rings")
    (number,) = (n for n, one in enumerate(record.collectives) if one.kind == "reduce_scatter")
    start, through, end = (event for event in events if event["ph"] in "stf" and event["id"] == number)
    work = [event for event in slices(events)[1] if event["cat"] == "compute"]
    (made,) = (w for w in work if w["ts"] < start["ts"] < w["ts"] + w["dur"])
    assert made["args"]["value"] == record.collectives[number].value and made["name"] == "dot_general"
    (used,) = (w for w in work if w["ts"] == end["ts"])
    assert any(record.collectives[number].result in op.operands for op in record.ops if used["args"]["op"] == op.kind)
    assert threads(events)[through["tid"]] == "links of model"


def test_slices_nest_by_phase_layer_and_scope() -> None:
    record = record_of("layers on TPUs")
    around, found = list[Event](), set[tuple[str, ...]]()
    for event in slices(events_of("layers on TPUs"))[1]:
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"] + NOTHING:
            around.pop()
        if event["cat"] == "compute":
            found.add((*(each["name"] for each in around), event["name"]))
        around.append(event)
    for number in range(LAYERS):
        for phase in ("forward", "backward"):
            assert (phase, f"layer_{number}", "mlp", "dot_general") in found
    assert {path[0] for path in found} == {"forward", "backward", "update"}
    assert {path[1] for path in found if path[0] == "update"} >= {"optimizer"}
    assert record.timeline.phases().keys() == {"forward", "backward", "update"}


def test_a_loop_is_one_trip_with_a_multiplier() -> None:
    (forward, backward) = (e for e in events_of("a loop") if e["ph"] == "X" and e["cat"] == "loop")
    for event in (forward, backward):
        assert event["name"] == f"while x {LAYERS}" and event["args"]["trips"] == LAYERS
    inside = [e for e in slices(events_of("a loop"))[1] if forward["ts"] <= e["ts"] < forward["ts"] + forward["dur"]]
    products = [event for event in inside if event["name"] == "dot_general"]
    assert len(products) == 2 and all(event["args"]["executions"] == LAYERS for event in products)
    assert products[0]["args"]["one execution (us)"] == pytest.approx(products[0]["dur"] / LAYERS, rel=1e-4)


def test_slices_say_their_bytes_operations_lines_and_reasons() -> None:
    events = events_of("layers, over a network")
    sent = [event for event in events if event["ph"] == "X" and event["cat"] in ("hidden", "exposed")]
    assert sent and {(each["cat"], each["cname"]) for each in sent} == {
        ("exposed", "thread_state_iowait"),
        ("hidden", "grey"),
    }
    for event in sent:
        said = event["args"]
        assert said["bytes on the wire"] > 0 and said["axes"] and said["reason"].startswith("for ")
        assert "timed_plans.py:" in said["line"]
    products = [event for event in events if event["ph"] == "X" and event["name"] == "dot_general"]
    assert products and all(event["args"]["flops"] > 0 and "@" in event["args"]["source"] for event in products)


def test_a_kernel_is_called_by_its_name() -> None:
    (kernel,) = (event for event in events_of("a kernel") if event["ph"] == "X" and event["cat"] == "kernel")
    assert "flash_attention" in kernel["name"] and kernel["args"]["bytes of memory"] > 0


def test_a_plan_and_its_record_write_it(tmp_path) -> None:
    plan = step_in_a_loop(H100)
    plan.to_trace(tmp_path / "a.json")
    plan.save(tmp_path / "plan.json")
    sdy.load_plan(tmp_path / "plan.json").to_trace(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    assert json.loads((tmp_path / "a.json").read_text())["otherData"]["rates"] == "h100, by its published rates"
    with pytest.raises(SdyError, match="the trace of the plan cannot be written to"):
        plan.to_trace(tmp_path / "none" / "a.json")


def test_costs_that_are_no_times_are_refused_with_what_to_give_instead(tmp_path) -> None:
    with pytest.raises(SdyError, match=r"has no times: its costs are bytes; to fix: .*of_machine\('h100', mesh\)"):
        step_of_layers(None).to_trace(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def test_the_command_line_writes_the_trace_of_a_saved_plan(tmp_path, capsys) -> None:
    step_in_a_loop(H100).save(tmp_path / "plan.json")
    assert main(["plan", str(tmp_path / "plan.json"), "--trace", str(tmp_path / "trace.json")]) == 0
    assert (tmp_path / "trace.json").read_text() == trace_json(sdy.load_plan(tmp_path / "plan.json"))
    step_in_a_loop(None).save(tmp_path / "bytes.json")
    assert main(["plan", str(tmp_path / "bytes.json"), "--trace", str(tmp_path / "none.json")]) == 1
    assert "has no times: its costs are bytes; to fix: " in capsys.readouterr().err
    assert not (tmp_path / "none.json").exists()


def test_the_command_line_refuses_the_trace_of_a_program_in_bytes(tmp_path, capsys) -> None:
    text = """sdy.mesh @mesh = <["data"=4]>
func.func @main(%x: tensor<64x64xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> tensor<64x64xf32> {
  %0 = stablehlo.tanh %x : tensor<64x64xf32>
  return %0 : tensor<64x64xf32>
}"""
    (tmp_path / "m.mlir").write_text(text)
    assert main(["plan", str(tmp_path / "m.mlir"), "--trace", str(tmp_path / "trace.json")]) == 1
    assert "has no times" in capsys.readouterr().err


def test_what_moves_to_the_host_has_a_track() -> None:
    record = offloading(H100).record()
    events = json.loads(trace_json(record))["traceEvents"]
    (track, *_) = (tid for tid, name in threads(events).items() if name == "host")
    own = [event for event in events if event["ph"] == "X" and event["cat"] == "host"]
    assert {event["name"] for event in own if event["tid"] == track} <= {"to the host", "to devices"}
    assert sum(event["dur"] for event in own) == pytest.approx(1e6 * record.timeline.host, rel=1e-6)
    assert sum(e["args"]["bytes"] * e["args"]["executions"] for e in own) == sum(each.total for each in record.host)
    for of_thread in slices(events).values():
        assert all(event["dur"] >= 0 for event in of_thread)


def test_what_was_measured_is_a_process_below_the_estimate() -> None:
    record = ran(record_of("layers, over a network"))
    assert record.run is not None and record == record_of("layers, over a network")
    events = json.loads(trace_json(record))["traceEvents"]
    estimated, own = ([event for event in events if event["pid"] == pid] for pid in (1, 2))
    assert estimated == events_of("layers, over a network")
    assert {"process_name", "process_labels", "thread_name"} <= {event["name"] for event in own if event["ph"] == "M"}
    of_thread, named = slices(own), threads(own)
    assert set(of_thread) == set(named) and {"compute", "links of data", "links of model"} <= set(named.values())
    assert list(named.values()).count("compute") == 2  # one beside another
    total, slices_of = sum(event["dur"] for each in of_thread.values() for event in each), record.run.slices
    assert total == pytest.approx(1e6 * sum(each.duration for each in slices_of), abs=NANOSECOND * len(slices_of))
    for each in of_thread.values():
        for event, later in pairwise(each):
            assert event["ts"] + event["dur"] <= later["ts"] + NOTHING
    sent = [event for each in of_thread.values() for event in each if "bytes on the wire" in event["args"]]
    assert sent and all(event["args"]["reason"].startswith("for ") for event in sent)
