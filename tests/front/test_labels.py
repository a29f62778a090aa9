"""Priority, tenant and cache namespace: from a client's fields to the scheduler's message."""

import pytest
from front.echo_door import Door

from tokenloom.tokenizer_proc.labels import Labelled, Labels, labels_of
from tokenloom.wire import codec
from tokenloom.wire.client_messages import Generate
from tokenloom.wire.messages import TokenizedGenerateReq

CHAT = "/v1/chat/completions"
ROUTES = (CHAT, "/v1/completions", "/generate")
BODY = {"prompt": "x", "text": "x", "messages": [{"role": "user", "content": "x"}]}
SECRET = "sk-very-secret"


def tenant_of(door: Door, authorization: str, **fields: object) -> str:
    headers = {"Authorization": authorization}
    assert door.call("POST", CHAT, BODY | fields, headers).status == 200
    return door.scheduler.of(TokenizedGenerateReq)[-1].tenant


@pytest.mark.parametrize("route", ROUTES)
def test_fields_reach_the_scheduler(door: Door, route: str) -> None:
    body = BODY if route == CHAT else BODY | {"prompt": ["a", "b"], "text": ["a", "b"]}
    asked = {"priority": -7, "user": "ada", "cache_salt": "s"}
    assert door.post(route, body | asked).status == 200
    sent = door.scheduler.of(TokenizedGenerateReq)
    assert len(sent) == (1 if route == CHAT else 2)
    assert {(one.priority, one.tenant, one.namespace) for one in sent} == {(-7, "ada", "s")}


@pytest.mark.parametrize("route", ROUTES)
def test_without_fields_nothing_is_said(door: Door, route: str) -> None:
    assert door.post(route, BODY).status == 200
    (sent,) = door.scheduler.of(TokenizedGenerateReq)
    assert (sent.priority, sent.tenant, sent.namespace) == (0, "", "")


def test_bounds() -> None:
    most = Generate("r", priority=(1 << 31) - 1, user="ü" * 256, cache_salt="\n" * 256)
    assert labels_of(most) == Labels((1 << 31) - 1, "ü" * 256, "\n" * 256)
    assert labels_of(Generate("r", priority=-(1 << 31))).priority == -(1 << 31)
    assert labels_of(Generate("r", user="")) == Labels()


def test_who_sends_a_token_is_a_tenant_and_the_token_stays_here(door: Door) -> None:
    tenant = tenant_of(door, f"Bearer {SECRET}")
    assert tenant_of(door, f"bearer  {SECRET} ") == tenant != ""
    assert tenant_of(door, "Bearer another") not in ("", tenant)
    assert all(SECRET.encode() not in codec.encode(message) for message in door.scheduler.sent)


def test_a_user_goes_before_a_token(door: Door) -> None:
    assert tenant_of(door, f"Bearer {SECRET}", user="ada") == "ada"
    assert tenant_of(door, f"Bearer {SECRET}", user="") == tenant_of(door, f"Bearer {SECRET}")


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer ", "Basic YTpi", "x"])
def test_other_authorization_is_nobody(door: Door, authorization: str) -> None:
    assert tenant_of(door, authorization) == ""


def test_requests_of_every_door_can_be_labelled() -> None:
    request: Labelled = Generate("r", priority=3)
    assert labels_of(request).priority == 3
