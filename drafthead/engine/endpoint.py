"""A server that somebody else started: SGLang, TensorRT-LLM, or vLLM on another machine."""

import os

import httpx

from drafthead.config.evaluation import EndpointConfig
from drafthead.engine.server import Server, ServerError


def endpoint_server(endpoint: EndpointConfig) -> Server:
    """The endpoint as a server to send load to, after it has named the model.

    Raises:
        ServerError: it does not answer, refuses the key, or serves other models.
    """
    key = ""
    if endpoint.api_key_env:
        key = os.environ.get(endpoint.api_key_env, "")
        if not key:
            raise ServerError(f"endpoint {endpoint.name}: environment variable {endpoint.api_key_env} is not set")
    url = endpoint.url.rstrip("/")
    server = Server(url, endpoint.model, key, None, (), 0.0, managed=False)
    try:
        with server.client(30) as client:
            answer = client.get("/v1/models")
    except httpx.TransportError as error:
        raise ServerError(
            f"endpoint {endpoint.name}: {url} does not answer ({error}); start it, or mend url"
        ) from error
    if answer.is_error:
        raise ServerError(f"endpoint {endpoint.name}: {url}/v1/models answered {answer.status_code}; see api_key_env")
    served = [model["id"] for model in answer.json()["data"]]
    if endpoint.model not in served:
        raise ServerError(f"endpoint {endpoint.name} serves {', '.join(served)}, not {endpoint.model}: mend model")
    return server
