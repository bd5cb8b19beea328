"""The warm start of a run: supervised training of the actor on the rows' completions."""

from jaxrlhf.data.loader import PromptLoader
from jaxrlhf.execution.executor import Executor
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.metrics import check_finite, flatten
from jaxrlhf.observe.timeline_recorder import Timeline
from jaxrlhf.run.assembly import Assembly
from jaxrlhf.run.checkpoints import Checkpoints, restore
from jaxrlhf.run.first_weights import Placed, load_first_weights
from jaxrlhf.run.interruption import Requests
from jaxrlhf.run.records import Records
from jaxrlhf.run.resume_point import ResumePoint

WARM_START_STEP = 2**31
"""The first step number of a warm start, which is not one of training."""


def train_actor_first(
    assembly: Assembly, *, resume: ResumePoint | None, timeline: Timeline, channel: Channel, console: Console,
    records: Records, checkpoints: Checkpoints, requests: Requests,
) -> Placed:  # fmt: skip
    """The actor's weights after all updates of the warm start, from its beginning or from where it is resumed.

    Raises RunStopped if it was asked to stop, and has saved.
    """
    phase, run, config = assembly.warm_start, assembly.config, assembly.config.warm_start
    assert phase is not None and config is not None
    executor = Executor(phase.roles, seed=run.seed, timeline=timeline, channel=channel)
    try:
        if resume is None or resume.position is None:
            load_first_weights(executor, phase, run, {})
            first, state = 0, phase.first_state
        else:
            first, state = resume.position.done, restore(resume, phase, executor)
        new_tokens = phase.graph.calls[0].terms[0].batch["sequences"].response.shape[1]
        loader = PromptLoader(assembly.table, config.batch_size * config.updates_per_step, run.seed)
        console.header(f"Warm start: {config.steps} supervised updates of {config.batch_size} rows")
        with console.progress(config.steps, start=first) as progress:
            for done in range(first + config.updates_per_step, config.steps + 1, config.updates_per_step):
                call = done // config.updates_per_step - 1
                rows, step = loader.batch(call, "demonstrations", max_new_tokens=new_tokens), WARM_START_STEP + call
                at = {"step": step, "phase": "warm start", "number": done}
                result = executor.run(phase.graph, phase.plan, state, rows, **at)
                state = result.state
                requests.has_unsaved(True)
                metrics = flatten({"warm_start": result.fetch()}) | {"warm_start/step": float(done)}
                records.write_metrics(0, metrics)
                check_finite(metrics, step=done)
                progress.update(done, {"loss": metrics["warm_start/actor/loss"]})
                stops, saves = requests.look()
                if stops or saves:
                    records.sync()
                    checkpoints.save_warm_start(done, executor, state)
                    requests.has_unsaved(False)
                    progress.resume()
                if stops:
                    checkpoints.wait()
                    raise requests.stopped(f"Saved after {done} of {config.steps} updates of the warm start.")
        return executor.weights.snapshot("actor")
    finally:
        executor.close()
