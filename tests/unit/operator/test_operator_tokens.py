"""Test which tokens are reviewed, and whose pod's they are."""

import base64
import json

import pytest
from typing_extensions import override

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator.cluster.resources import TOKEN_REVIEWS, Resource
from stepkeeper_operator.endpoint.tokens import KubernetesTokens, TokenPod
from stepkeeper_operator.facts.raw import RawObject


class Reviewer(FakeCluster):
    """Answer TokenReviews as an API server does."""

    def __init__(self, status: RawObject) -> None:
        super().__init__(lambda: 0.0)
        self.status = status
        self.asked = 0

    @override
    async def create(self, resource: Resource, namespace: str | None, body: RawObject) -> RawObject:
        assert resource is TOKEN_REVIEWS
        self.asked += 1
        return {"status": self.status}


def reviewed(**more: object) -> dict[str, object]:
    extra = {
        "authentication.kubernetes.io/pod-name": ["lm-w-0-0-abc"],
        "authentication.kubernetes.io/pod-uid": ["u1"],
    }
    user = {"username": "system:serviceaccount:team-a:default", "extra": extra}
    return {"authenticated": True, "audiences": ["stepkeeper.dev/jobs/1"], "user": user} | more


def jwt(claims: object) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"e30.{payload}.c2ln"


AUDIENCE = "stepkeeper.dev/jobs/1"
TOKEN = jwt({"aud": [AUDIENCE], "sub": "system:serviceaccount:team-a:default"})


async def test_the_pod_of_a_token_is_the_one_that_the_review_names() -> None:
    reviewer = Reviewer(reviewed())
    tokens = KubernetesTokens(reviewer)
    assert tokens.claims(TOKEN, AUDIENCE)
    pod = TokenPod(namespace="team-a", name="lm-w-0-0-abc", uid="u1")
    assert await tokens.verify(TOKEN, AUDIENCE) == pod
    assert await tokens.verify(TOKEN, AUDIENCE) == pod
    assert reviewer.asked == 1
    assert await tokens.verify(jwt({"aud": AUDIENCE}), AUDIENCE) == pod, "one audience needs no list"


@pytest.mark.parametrize(
    "token",
    [
        "a.b.c",
        "e30..c2ln",
        jwt({"aud": ["https://kubernetes.default.svc"]}),
        jwt({"aud": None}),
        jwt([AUDIENCE]),
        jwt({"aud": [AUDIENCE]}).rpartition(".")[0] + ".",
        "e30." + base64.urlsafe_b64encode(b"[" * 100_000).decode() + ".c2ln",
        "\udcff.\udcff.x",
    ],
)
async def test_what_does_not_even_look_like_a_token_for_the_job_costs_no_review(token: str) -> None:
    reviewer = Reviewer(reviewed())
    tokens = KubernetesTokens(reviewer)
    assert not tokens.claims(token, AUDIENCE)
    assert await tokens.verify(token, AUDIENCE) is None
    assert reviewer.asked == 0


async def test_a_refusal_is_believed_for_seconds() -> None:
    now = 0.0
    reviewer = Reviewer({"authenticated": False})
    tokens = KubernetesTokens(reviewer, clock=lambda: now)
    for _ in range(100):
        assert await tokens.verify(TOKEN, AUDIENCE) is None
    assert reviewer.asked == 1
    now += 11
    reviewer.status = reviewed()
    assert await tokens.verify(TOKEN, AUDIENCE) is not None


@pytest.mark.parametrize(
    "status",
    [
        {"authenticated": False},
        reviewed(audiences=["https://kubernetes.default.svc"]),
        reviewed(user={"username": "admin", "extra": {}}),
        reviewed(user={"username": "system:serviceaccount:team-a:default"}),
    ],
    ids=["not authenticated", "another audience", "a person", "a service account without a pod"],
)
async def test_any_other_token_is_none(status: RawObject) -> None:
    assert await KubernetesTokens(Reviewer(status)).verify(TOKEN, AUDIENCE) is None
