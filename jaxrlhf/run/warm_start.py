"""The warm start of a run: supervised training of the actor, before the algorithm's first step."""

from jaxrlhf.execution.channel import Channel
from jaxrlhf.execution.executor import Executor
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.metrics import check_finite, flatten
from jaxrlhf.observe.timeline import Timeline
from jaxrlhf.run.assembly import Assembly
from jaxrlhf.run.checkpoints import Checkpoints, restore
from jaxrlhf.run.first_weights import Placed, load_first_weights
from jaxrlhf.run.records import Records, SilentRecords
from jaxrlhf.run.requests import Requests
from jaxrlhf.run.resume_point import ResumePoint

WARM_START_STEP = 2**31
"""The first step number of a warm start, apart from those of training."""


def warm_start(
    assembly: Assembly,
    records: Records | SilentRecords,
    checkpoints: Checkpoints,
    console: Console,
    timeline: Timeline,
    requests: Requests,
    resume: ResumePoint | None,
    channel: Channel,
) -> Placed:
    """The actor's weights after supervised training.

    Args:
        resume: A checkpoint in the warm start to go on from.

    Raises:
        RunStopped: It was asked to stop, and has saved.
        TrainingError: A loss is not finite.
    """
    phase, config = assembly.warm_start, assembly.config.warm_start
    assert phase is not None and config is not None
    executor = Executor(phase.roles, seed=assembly.config.seed, timeline=timeline, channel=channel)
    try:
        if resume is None or resume.position is None:
            load_first_weights(executor, phase, assembly.config, {})
            first, state = 0, phase.first_state
        else:
            first, state = resume.position.done, restore(resume, phase, executor)
        new_tokens = phase.graph.calls[0].terms[0].batch["sequences"].response.shape[1]
        rows_a_call = config.batch_size * config.updates_per_step
        console.header(f"Warm start: {config.steps} supervised updates of {config.batch_size} rows")
        with console.progress(config.steps, start=first) as progress:
            for done in range(first + config.updates_per_step, config.steps + 1, config.updates_per_step):
                call = done // config.updates_per_step - 1
                rows = assembly.loader.demonstrations(call, rows_a_call, new_tokens)
                result = executor.run(
                    phase.graph, phase.plan, state, rows, step=WARM_START_STEP + call, phase="warm start", number=done
                )
                state = result.state
                requests.has_unsaved(True)
                metrics = flatten({"warm_start": result.fetch()}) | {"warm_start/step": float(done)}
                records.write_metrics(0, metrics)
                check_finite(metrics, step=done)
                progress.update(done, {"loss": metrics["warm_start/actor/loss"]})
                asked = requests.look()
                if asked.stop or asked.save:
                    records.sync()
                    checkpoints.save_warm_start(done, executor, state)
                    requests.has_unsaved(False)
                    progress.resume()
                if asked.stop:
                    checkpoints.wait()
                    raise requests.stopped(f"Saved after {done} of {config.steps} updates of the warm start.")
        return executor.weights.snapshot("actor")
    finally:
        executor.close()
