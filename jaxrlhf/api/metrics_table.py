"""The metrics of a run as a table of pandas, which need not be installed for anything else."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


def metrics_table(records: Sequence[Mapping[str, Any]]) -> "pandas.DataFrame":
    """A row for each step, with the evaluation after it; `step` is the index. Records of a warm start are left out.

    Raises ImportError if pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            "metrics: needs the package pandas. Got none installed. Install it by pip install "
            "'jaxrlhf[notebooks]', or read run.records, which are dicts."
        ) from error
    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        if "warm_start/step" not in record:
            rows[record["step"]] = {**rows.get(record["step"], {}), **record}
    columns = dict.fromkeys(["step", *(name for row in rows.values() for name in row)])
    return pandas.DataFrame(list(rows.values()), columns=list(columns)).set_index("step")
