"""Watts and clock beside what is timed, of a GPU that is none."""

import time

import pytest

from benchmarks import kernels, power, tables, timing


class SteadyGpu:
    """A GPU that draws 600 W, and whose clock falls at each look."""

    def __init__(self):
        self.clock = 2000.0

    def joules(self) -> float:
        return 600 * time.perf_counter()

    def sm_mhz(self) -> float:
        self.clock -= 10
        return self.clock


def test_a_meter_has_mean_watts_and_the_median_clock():
    with power.Meter(SteadyGpu()) as meter:
        time.sleep(0.1)
    figures = meter.figures()
    assert figures["watts"] == pytest.approx(600, rel=0.05)
    assert 1900 < figures["sm_mhz"] < 1990
    assert len(meter.clocks) >= 2


def test_without_a_gpu_there_are_no_figures(monkeypatch):
    monkeypatch.setattr(power, "first_gpu", lambda: None)
    with power.Meter() as meter:
        pass
    assert meter.figures() == {}
    assert power.Meter.__enter__(meter).figures() == {}


def test_the_meter_is_on_during_the_windows_alone():
    calls = []

    class Counted(power.Meter):
        def __enter__(self):
            calls.append("begin")
            return self

        def __exit__(self, *_):
            calls.append("end")

    run = lambda: calls.append("call")
    timing.median_ms(run, [()], calls=1, windows=2, meter=Counted(SteadyGpu()))
    assert calls[-4:] == ["begin", "call", "call", "end"] and "begin" not in calls[:-4]


def test_a_kernels_row_and_its_table_have_them(monkeypatch):
    monkeypatch.setattr(power, "first_gpu", SteadyGpu)
    figures = kernels.measured(lambda x: x + 1, [(1.0,)], 1.0, calls=1, seconds=0.01)
    assert figures is not None and figures["watts"] == pytest.approx(600, rel=0.2)
    rows = [{"name": "copy", "shape": "s", "backend": "xla", **figures}]
    record = {"device": "gpu", "device_count": 1, "variant": "bf16", "rows": rows}
    header, cells = tables.listed({}, [record], [])
    assert header[-3:-1] == ["W", "MHz"]
    assert float(cells[0][-3]) == pytest.approx(600, rel=0.2)
    del rows[0]["watts"], rows[0]["sm_mhz"]
    assert "W" not in tables.listed({}, [record], [])[0]
