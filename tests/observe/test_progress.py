from tests.shown import Shown


def test_progress_prints_every_so_many_steps_and_at_least_every_ten_seconds() -> None:
    shown = Shown()
    with shown.console.progress(30, every=10) as progress:
        for step in range(1, 31):
            shown.clock.now += 1.0 if step < 21 else 6.0
            progress.update(step, {"reward": step / 10})
    assert [line.split("/30")[0] for line in shown.lines()] == [
        "step  1",
        "step 10",
        "step 20",
        "step 22",
        "step 24",
        "step 26",
        "step 28",
        "step 30",
    ]


def test_progress_prints_the_last_step_always() -> None:
    shown = Shown()
    with shown.console.progress(13, every=10) as progress:
        for step in range(1, 14):
            progress.update(step, {})
    assert [line.split("/13")[0] for line in shown.lines()] == ["step  1", "step 10", "step 13"]


def test_a_progress_line_tells_rate_breakdown_and_time_to_go() -> None:
    shown = Shown(width=40)
    calls = {"actor.generate": 1.25, "reference.logprobs": 0.05, "critic.values": 0.1, "actor.train": 0.5, "x": 0.01}
    with shown.console.progress(1000, every=1) as progress:
        # The first step compiles; what is to come is judged without it.
        shown.clock.now = 60.0
        progress.update(1, {"reward": 0.12345, "KL": 0.01, "length": 31.25}, calls)
        shown.clock.now = 62.0
        progress.update(2, {"reward": 0.5}, {"actor.train": 0.5})
        shown.clock.now = 66.0
        progress.update(3, {"reward": 1234.5})
    first, second, third = shown.lines()
    assert first == (
        "step    1/1000  reward 0.123  KL 0.01  length 31.2  60 s/step  "
        "(actor.generate 1.25, actor.train 0.50, critic.values 0.10, 2 others 0.06)"
    )
    assert second == "step    2/1000  reward 0.5  2 s/step  ETA 33m16s  (actor.train 0.50)"
    assert third == "step    3/1000  reward 1234  3 s/step  ETA 49m51s"


def test_progress_of_a_resumed_run_counts_from_where_it_starts() -> None:
    shown = Shown()
    with shown.console.progress(100, start=90, every=1) as progress:
        shown.clock.now = 5.0
        progress.update(91, {})
        # Two steps in one update.
        shown.clock.now = 9.0
        progress.update(93, {})
    assert shown.lines() == ["step  91/100  5 s/step", "step  93/100  2 s/step  ETA 14s"]


def test_progress_tells_the_rate_and_the_last_checkpoint() -> None:
    shown = Shown()
    with shown.console.progress(4, every=1) as progress:
        progress.saved(0)
        for step in (1, 2):
            shown.clock.now += 2.0
            progress.update(step, {"reward": 0.5}, {"gen": 1.0}, tokens=2 * 81_234.5)
        progress.saved(2)
        shown.clock.now += 60.0  # of the checkpoint
        progress.resume()
        shown.clock.now += 4.0
        progress.update(3, {}, tokens=81_234.5)
    assert shown.lines() == [
        "step 1/4  reward 0.5  2 s/step  81234 tokens/s  saved 0  (gen 1.00)",
        "step 2/4  reward 0.5  2 s/step  81234 tokens/s  ETA 4s  saved 0  (gen 1.00)",
        "step 3/4  3 s/step  40617 tokens/s  ETA 3s  saved 2",
    ]


def test_progress_tells_how_busy_the_devices_were() -> None:
    shown = Shown()
    with shown.console.progress(3, every=1) as progress:
        for overlap in (0.0, 0.004, 0.254):
            shown.clock.now += 2.0
            progress.update(round(shown.clock.now / 2), {}, busy=0.785, overlap=overlap, tokens=18.0)
    assert shown.lines() == [
        "step 1/3  2 s/step  9 tokens/s  busy 78%",
        "step 2/3  2 s/step  9 tokens/s  busy 78%  ETA 2s",
        "step 3/3  2 s/step  9 tokens/s  busy 78%  overlap 25%",
    ]


def test_a_long_call_tells_how_far_it_is_after_ten_seconds_without_a_line() -> None:
    shown = Shown()
    with shown.console.progress(3, every=1) as progress:
        for shown.clock.now in (6.0, 12.0, 18.0, 24.0):
            progress.within_step(f"after {shown.clock.now:g} s")
        progress.update(1, {})
    assert shown.lines() == ["step 1  after 12 s", "step 1  after 24 s", "step 1/3  24 s/step"]
