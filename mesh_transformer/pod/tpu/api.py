"""The Cloud TPU API as TpuVm needs it: few calls, each with a time limit, errors in plain words."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mesh_transformer.pod.tpu.signals import Signals
from mesh_transformer.pod.tpu.spec import TpuSpec
from mesh_transformer.util import HostError, InputError, StoppedError

if TYPE_CHECKING:
    from google.api_core.exceptions import GoogleAPICallError
    from google.cloud import tpu_v2

RPC_SECONDS = 30.0  # for one request; a host's life is waited for by polling
RETRY_SECONDS = 120.0  # a reading request is sent again for so long
# gcloud's own name for it, so that the delete commands printed here go to the same place.
ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU"


class PreemptedError(StoppedError):
    """The TPU was taken away: `TpuVm.make_again` makes a new one."""


class CapacityError(StoppedError):
    """The zone has no such TPU to give at present."""


class UnavailableError(HostError):
    """The API gave no answer; it may have done what was asked."""


class QuotaError(InputError):
    """The project may not have so many TPUs, or not so soon after it had them."""


def new_client() -> "tpu_v2.TpuClient":
    """The real client, with this machine's default credentials.

    The environment's ENDPOINT ("https://HOST:PORT/", TLS too) takes the place of Google's own.
    """
    try:
        from google.api_core.client_options import ClientOptions
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud import tpu_v2
    except ImportError as error:
        raise InputError(
            f"package {error.name!r} is missing, which TPUs need; pip install google-cloud-tpu"
        ) from error
    endpoint = os.environ.get(ENDPOINT)
    options = ClientOptions(api_endpoint=_host_of(endpoint)) if endpoint else None
    try:
        return tpu_v2.TpuClient(client_options=options)
    except DefaultCredentialsError as error:
        raise InputError(
            "no Google Cloud credentials were found; run `gcloud auth application-default login`, "
            "or start on a VM with a service account"
        ) from error


def _host_of(endpoint: str) -> str:
    found = urlsplit(endpoint)
    if found.scheme != "https" or not found.netloc:
        raise InputError(f"{ENDPOINT} is {endpoint!r}; give https://HOST:PORT/, or unset it")
    return found.netloc


def default_project() -> str:
    """The project of this machine's credentials."""
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    with contextlib.suppress(DefaultCredentialsError):
        project = google.auth.default()[1]
        if project:
            return project
    raise InputError(
        "no Google Cloud project is set; give one, or run `gcloud config set project PROJECT`"
    )


class TpuApi:
    """Requests about one TPU, and its queued resource where `spec` asks for one.

    Raises InputError where the request or its credentials are at fault, QuotaError where it may
    be another time, UnavailableError where there was no answer, CapacityError or StoppedError
    where none of these.
    """

    def __init__(self, spec: TpuSpec, client: "tpu_v2.TpuClient | None", signals: Signals):
        self._client: Any = _Undisturbed(client or new_client(), signals)
        project = spec.project or default_project()
        self.spec = dataclasses.replace(spec, project=project)
        self._parent = f"projects/{project}/locations/{spec.zone}"
        self._node_name = f"{self._parent}/nodes/{spec.name}"
        self._queued_name = f"{self._parent}/queuedResources/{spec.name}"

    def node(self) -> "tpu_v2.Node | None":
        return self._read(self._client.get_node, self._node_name)

    def queued(self) -> "tpu_v2.QueuedResource | None":
        if not self.spec.queued:
            return None
        return self._read(self._client.get_queued_resource, self._queued_name)

    def _read(self, method: Any, name: str) -> Any:
        from google.api_core import exceptions, retry

        again = retry.Retry(
            predicate=retry.if_exception_type(*_silences(), exceptions.TooManyRequests),
            maximum=10.0,
            timeout=RETRY_SECONDS,
        )
        try:
            with self._explained():
                # The client's own way to try again would take the pauses for requests, too.
                request = functools.partial(method, retry=None, timeout=RPC_SECONDS)
                return again(request)(request={"name": name})
        except _MissingError:
            return None

    def create(
        self, labels: Mapping[str, str], metadata: Mapping[str, str], queue_seconds: float
    ) -> str:
        """Asks for the TPU: the name of an operation that ends when it is made, or in the queue."""
        from google.cloud import tpu_v2

        node = self._described(labels, metadata)
        with self._explained(creating=True):
            if not self.spec.queued:
                operation = self._client.create_node(
                    parent=self._parent, node_id=self.spec.name, node=node, timeout=RPC_SECONDS
                )
                return operation.operation.name
            wanted = {"parent": self._parent, "node_id": self.spec.name, "node": node}
            resource = tpu_v2.QueuedResource(
                tpu={"node_spec": [wanted]},
                # The request lapses by itself, even where this program was killed meanwhile.
                queueing_policy={"valid_until_duration": {"seconds": int(queue_seconds)}},
                spot=tpu_v2.QueuedResource.Spot() if self.spec.tier == "spot" else None,
            )
            operation = self._client.create_queued_resource(
                parent=self._parent,
                queued_resource_id=self.spec.name,
                queued_resource=resource,
                timeout=RPC_SECONDS,
            )
            return operation.operation.name

    def _described(self, labels: Mapping[str, str], metadata: Mapping[str, str]) -> "tpu_v2.Node":
        from google.cloud import tpu_v2

        spec = self.spec
        # In the queue the tier belongs to the request, and the API refuses it here as well.
        tier = None if spec.queued else spec.tier
        return tpu_v2.Node(
            accelerator_type=spec.accelerator_type,
            runtime_version=spec.runtime,
            network_config={
                "network": spec.network or "",
                "subnetwork": spec.subnetwork or "",
                "enable_external_ips": spec.external_ips,
            },
            scheduling_config={"spot": tier == "spot", "preemptible": tier == "preemptible"},
            labels=dict(labels),
            metadata=dict(metadata),
        )

    def delete_node(self) -> None:
        self._delete(lambda: self._client.delete_node(name=self._node_name, timeout=RPC_SECONDS))

    def delete_queued(self) -> None:
        request = {"name": self._queued_name, "force": True}  # its node with it
        self._delete(
            lambda: self._client.delete_queued_resource(request=request, timeout=RPC_SECONDS)
        )

    def _delete(self, request: Any) -> None:
        """Sends a request to delete; where it may go through later, the caller sends it again."""
        from google.api_core import exceptions

        # The first two: another operation is in the way.
        passing = (exceptions.FailedPrecondition, exceptions.Aborted, *_silences())
        with contextlib.suppress(_MissingError, *passing), self._explained(passing):
            request()

    def operation_done(self, name: str) -> bool:
        """Whether an operation has ended; raises what it ended with, if that is an error."""
        operation = self._read(self._client.get_operation, name)
        if operation is not None and operation.HasField("error"):
            raise self._failure(operation.error, "the TPU could not be made")
        return operation is None or operation.done

    def queued_error(self, resource: "tpu_v2.QueuedResource") -> Exception:
        """Why a queued resource failed."""
        return self._failure(
            resource.state.failed_data.error, "the request could not be met in time"
        )

    def _failure(self, status: Any, otherwise: str) -> Exception:
        """What a request to make the TPU came to; `otherwise` is said where the API is silent."""
        from google.api_core import exceptions

        error = exceptions.from_grpc_status(status.code, status.message or otherwise)
        return self.explain(error, creating=True)

    def host_keys(self, host: int) -> list[tuple[str, str]]:
        """(type, base64) of the SSH host keys that a host has published, maybe none yet."""
        from google.api_core import exceptions

        request = {
            "name": self._node_name,
            "query_path": "hostkeys/",
            "worker_ids": [str(host)],
        }
        try:
            found = self._client.get_guest_attributes(request=request, timeout=RPC_SECONDS)
        except exceptions.GoogleAPICallError:
            return []
        return [
            (item.key, item.value)
            for attributes in found.guest_attributes
            for item in attributes.query_value.items
        ]

    @contextlib.contextmanager
    def _explained(
        self, passing: tuple[type[Exception], ...] = (), *, creating: bool = False
    ) -> Iterator[None]:
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError

        try:
            yield
        except passing:
            raise
        except exceptions.RetryError as error:
            raise UnavailableError(
                f"the Cloud TPU API gave no answer for {RETRY_SECONDS:g} s "
                f"({_line(error.cause)}); is it reachable?"
            ) from error
        except exceptions.NotFound as error:
            if not creating:
                raise _MissingError from error
            raise self.explain(error, creating) from error
        except exceptions.GoogleAPICallError as error:
            raise self.explain(error, creating) from error
        except GoogleAuthError as error:
            raise InputError(
                f"the Google Cloud credentials were not accepted ({_line(error)}); run "
                "`gcloud auth application-default login`"
            ) from error

    def explain(self, error: "GoogleAPICallError", creating: bool = False) -> Exception:
        """The API's error as one of ours: what was asked, what it said, what to do."""
        from google.api_core import exceptions

        spec, said = self.spec, _line(error.message)
        asked = f"TPU {spec.name!r} ({spec.accelerator_type} in {spec.zone})"
        if isinstance(error, exceptions.AlreadyExists):
            return taken(spec)
        if isinstance(error, exceptions.TooManyRequests):  # RESOURCE_EXHAUSTED says both
            if "quota" in said.lower():
                return QuotaError(f"{asked}: {said}; ask for more quota, or a smaller TPU")
            return CapacityError(f"{asked}: {said}; try later, in another zone, or queue for it")
        if isinstance(error, exceptions.Forbidden | exceptions.Unauthorized):
            return InputError(
                f"{asked}: {said}; check the zone, that the API tpu.googleapis.com is enabled and "
                f"that the account has the role roles/tpu.admin in project {spec.project!r}"
            )
        if creating and isinstance(error, exceptions.InvalidArgument | exceptions.NotFound):
            return InputError(f"{asked}, {spec.runtime}: {said}; {self._on_offer()}")
        silent = isinstance(error, _silences())
        return UnavailableError(f"{asked}: {said}") if silent else StoppedError(f"{asked}: {said}")

    def _on_offer(self) -> str:
        """What the zone has, to choose from; also the sign that the zone exists."""
        from google.api_core import exceptions

        try:
            types = self._client.list_accelerator_types(parent=self._parent, timeout=RPC_SECONDS)
            offered = sorted({each.type_ for each in types})
            found = self._client.list_runtime_versions(parent=self._parent, timeout=RPC_SECONDS)
            versions = {each.version for each in found}
        except exceptions.GoogleAPICallError:
            offered, versions = [], set()
        generation = [each for each in offered if each.startswith(f"{self.spec.generation}-")]
        if not offered:
            return "check the zone: it lists no TPUs"
        if self.spec.accelerator_type not in offered:
            return f"the zone has {', '.join(generation or offered)}"
        if versions and self.spec.runtime not in versions:
            return f"its runtime versions are {', '.join(sorted(versions))}"
        return "check the accelerator type, the runtime version and the network"


class _Undisturbed:
    """A client whose requests no signal breaks off: it raises once the answer is there."""

    def __init__(self, client: "tpu_v2.TpuClient", signals: Signals):
        self._client, self._signals = client, signals

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def request(*arguments: Any, **options: Any) -> Any:
            with self._signals.undisturbed():
                return method(*arguments, **options)

        return request


class _MissingError(Exception):
    """The resource does not exist."""


def _silences() -> tuple[type[Exception], ...]:
    """What the API's client raises where the service gave no proper answer."""
    from google.api_core import exceptions

    return (
        exceptions.ServiceUnavailable,
        exceptions.DeadlineExceeded,
        exceptions.InternalServerError,
    )


def taken(spec: TpuSpec) -> InputError:
    return InputError(
        f"TPU {spec.name!r} exists already in {spec.zone}; take another name, or delete it: "
        f"{spec.delete_command()}"
    )


def _line(words: object) -> str:
    return " ".join(str(words).split()).rstrip(".")
