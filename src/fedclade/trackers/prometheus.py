"""Exporter of a run's metrics for Prometheus, which collects them over HTTP while the run is on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from time import time
from types import TracebackType
from typing import Any, Self

from fedclade.core import LeftOut, RunError, checked, generalize_reason, import_extra
from fedclade.runs import Callback, EndRecord, RoundRecord, Row, version_of
from fedclade.trackers.tracker import scores

MOST_REASONS = 20
"""Largest number of distinct reasons for which left-out replies are counted.

A reason may be the text of a client's error, and each reason becomes a time series in Prometheus.
So a malicious client could create any number of time series.
"""

LONGEST_REASON = 100
"""Largest number of characters of a reason; longer reasons are cut off."""

OTHER = "other reasons"
"""Label of the replies that are left out for further reasons."""

PHASES = ("train", "evaluate", "server")
"""Phases of a round, by the ends of the columns ``seconds_...`` in ``metrics.parquet``."""


class PrometheusExporter(Callback):
    """Callback that serves the metrics of a run over HTTP, in the text format of Prometheus.

    The metrics are updated after every round. Counters start at 0 when the program starts, also if
    a run is continued; Prometheus takes this into account. Use the exporter as a context manager,
    or call :meth:`close`.

    Parameters
    ----------
    port
        Port to listen on; 0 for any free port.
    address
        Address to listen on. The metrics are neither encrypted nor protected by a password, so by
        default only programs on the same machine can read them.

    Raises
    ------
    MissingExtraError
        If prometheus-client is not installed.
    RunError
        If the port or the address cannot be used, for example because another program uses it.

    Examples
    --------
    .. code-block:: python

        with PrometheusExporter(9100) as exporter:
            fedclade.simulate("cfl", "mlp", federation, callbacks=[exporter])
    """

    @checked()
    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self._client: Any = import_extra(
            "prometheus_client", "prometheus-client", "monitoring", "network.metrics"
        )
        self.registry: Any = self._client.CollectorRegistry()
        self._create_metrics()
        try:
            self._server, self._thread = self._client.start_http_server(
                port, address, self.registry
            )
        except (OSError, OverflowError) as error:  # the latter for a port above 65535
            raise RunError(
                f"the metrics for Prometheus cannot be served on {address}:{port}: {error}; choose "
                "another port in network.metrics, or another address in network.metrics_address"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def port(self) -> int:
        """Port on which the exporter listens."""
        return self._server.server_port

    def close(self) -> None:
        """Stop to serve the metrics."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def on_round(self, record: RoundRecord, /) -> None:
        """Update all metrics after a round."""
        row = record.metrics
        self._rounds_planned.set(record.config["rounds"])
        self._round.set(record.round)
        self._rounds.inc()
        self._last_round.set(time())
        self._clusters.set(row["clusters"])
        self._replies.inc(row["clients_trained"])
        self._count_left_out(record)
        self._add_costs(row)
        if (present := row.get("clients_present")) is not None:
            self._connected.set(present)
        self._set_scores(row)
        self._set_privacy(record)
        self._run.info(_describe_run(record.config))

    def on_end(self, record: EndRecord, /) -> None:
        """Set the state of the run, such as ``finished``, until the exporter is closed."""
        self._state.state(record.reason)

    def _create_metrics(self) -> None:
        """Create all metrics. Numbers that are unknown before the first round are NaN until then."""
        client = self._client

        def gauge(name: str, text: str, *labels: str, unknown: bool = False) -> Any:
            found = client.Gauge(f"fedclade_{name}", text, labels, registry=self.registry)
            if unknown:
                found.set(math.nan)
            return found

        def counter(name: str, text: str, *labels: str) -> Any:
            return client.Counter(f"fedclade_{name}", text, labels, registry=self.registry)

        self._run = client.Info("fedclade_run", "The run", registry=self.registry)
        self._state = client.Enum(
            "fedclade_run_state",
            "State of the run",
            states=["running", "finished", "interrupted", "failed"],
            registry=self.registry,
        )
        self._round = gauge("round", "Number of the last round", unknown=True)
        self._rounds_planned = gauge("rounds_planned", "Planned rounds", unknown=True)
        self._rounds = counter("rounds", "Rounds since the program started")
        self._last_round = gauge(
            "last_round_timestamp_seconds", "Unix time of the end of the last round", unknown=True
        )
        self._connected = gauge(
            "connected_clients", "Clients connected in the last round", unknown=True
        )
        self._clusters = gauge("clusters", "Clusters after the last round", unknown=True)
        self._replies = counter("replies", "Training replies that were used")
        self._left_out = counter(
            "left_out", "Replies that are missing or were not used, by reason", "reason"
        )
        self._seconds = counter("phase_seconds", "Seconds of rounds, by phase", "phase")
        for phase in PHASES:
            self._seconds.labels(phase)
        self._traffic = counter(
            "traffic_bytes", "Bytes from clients (up) and to clients (down)", "direction"
        )
        for direction in ("up", "down"):
            self._traffic.labels(direction)
        self._score = gauge(
            "score", "Score on test data in the last evaluation", "metric", "statistic"
        )
        self._epsilon = gauge(
            "privacy_epsilon", "Privacy budget epsilon spent so far", unknown=True
        )
        self._delta = gauge("privacy_delta", "Delta of the privacy budget", unknown=True)
        self._reasons: set[str] = set()
        client.ProcessCollector(registry=self.registry)  # memory, processor time and open files

    def _count_left_out(self, record: RoundRecord) -> None:
        """Count the replies that were left out in a round, by reason."""
        for event in record.events:
            if isinstance(event, LeftOut):
                for reason in event.clients.values():
                    self._left_out.labels(self._limit_reason(reason)).inc()

    def _limit_reason(self, reason: str) -> str:
        """Return the label for a reason: a short text without numbers, or :data:`OTHER`."""
        general = generalize_reason(reason)[:LONGEST_REASON]
        if general not in self._reasons and len(self._reasons) >= MOST_REASONS:
            return OTHER
        self._reasons.add(general)
        return general

    def _add_costs(self, row: Row) -> None:
        """Add the seconds and the bytes of a round."""
        for phase in PHASES:
            # Clocks differ slightly between threads, and a counter must not decrease.
            self._seconds.labels(phase).inc(max(0.0, row[f"seconds_{phase}"]))
        for direction in ("up", "down"):
            self._traffic.labels(direction).inc(row[f"bytes_{direction}"])

    def _set_scores(self, row: Row) -> None:
        """Set the scores of a round; without an evaluation, the earlier scores remain."""
        for tag, column in scores(row).items():
            if (value := row.get(column)) is not None:
                metric, statistic = tag.split("/", 1)
                self._score.labels(metric, statistic).set(value)

    def _set_privacy(self, record: RoundRecord) -> None:
        """Set the privacy budget that clients have spent, if the server knows it."""
        if not record.config.get("privacy", {}).get("noise_multiplier"):
            return
        run = record.so_far()
        privacy = {} if run is None else run.summary.get("privacy", {})
        if privacy.get("epsilon") is not None:
            self._epsilon.set(privacy["epsilon"])
            self._delta.set(privacy["delta"])


def _describe_run(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of a run: method, data and version."""
    return {
        "algorithm": config["algorithm"]["name"],
        "data": config["data"]["name"],
        "version": version_of("fedclade"),
    }
