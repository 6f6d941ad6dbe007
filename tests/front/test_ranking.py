"""The search finds the right operation among GitHub's 1,223: first for 20 of 30 queries, in the first five for 27."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from operations import OperationContext, OperationRegistry, OperationSpec, OperationType
from operations.front.search import Gateway, Ranking, stem
from operations.openapi import from_openapi

DOCUMENT = Path(__file__).parents[3] / "shared" / "openapi" / "octokit__api.github.com.json"

TUNED = {
    "open a new issue": "issues_create",
    "close an issue": "issues_update",
    "comment on an issue": "issues_create-comment",
    "list my repositories": "repos_list-for-authenticated-user",
    "create a pull request": "pulls_create",
    "merge pull request": "pulls_merge",
    "files changed in a pull request": "pulls_list-files",
    "delete a branch": "git_delete-ref",
    "rename branch": "repos_rename-branch",
    "protect a branch": "repos_update-branch-protection",
    "read file content": "repos_get-content",
    "write a file": "repos_create-or-update-file-contents",
    "find code": "search_code",
    "trigger a workflow": "actions_create-workflow-dispatch",
    "download workflow logs": "actions_download-workflow-run-logs",
    "cancel workflow run": "actions_cancel-workflow-run",
    "set a repository secret": "actions_create-or-update-repo-secret",
    "who am I": "users_get-authenticated",
    "star a repo": "activity_star-repo-for-authenticated-user",
    "add a label to an issue": "issues_add-labels",
    "fork repository": "repos_create-fork",
    "invite someone to an organization": "orgs_create-invitation",
    "latest release": "repos_get-latest-release",
    "make a gist": "gists_create",
    "list commits": "repos_list-commits",
    "compare two branches": "repos_compare-commits-with-basehead",
    "add collaborator": "repos_add-collaborator",
    "mark notifications as read": "activity_mark-notifications-as-read",
    "remove webhook": "repos_delete-webhook",
    "rate limit": "rate-limit_get",
}
"""The weights were chosen with these."""

UNSEEN = {
    "assign someone to an issue": "issues_add-assignees",
    "lock conversation": "issues_lock",
    "edit a comment": "issues_update-comment",
    "remove a label from an issue": "issues_remove-label",
    "ask for a review": "pulls_request-reviewers",
    "approve a pull request": "pulls_create-review",
    "is this pull request merged": "pulls_check-if-merged",
    "make a new repository": "repos_create-for-authenticated-user",
    "erase a repository": "repos_delete",
    "get a repository": "repos_get",
    "list branches": "repos_list-branches",
    "list contributors": "repos_list-contributors",
    "change topics of a repository": "repos_replace-all-topics",
    "readme of a repository": "repos_get-readme",
    "publish a release": "repos_create-release",
    "upload release file": "repos_upload-release-asset",
    "rerun failed jobs": "actions_re-run-workflow-failed-jobs",
    "list workflow runs": "actions_list-workflow-runs-for-repo",
    "download artifact": "actions_download-artifact",
    "create organization variable": "actions_create-org-variable",
    "search users": "search_users",
    "follow a user": "users_follow",
    "block user": "users_block",
    "list team members": "teams_list-members-in-org",
    "create a team": "teams_create",
    "dismiss dependabot alert": "dependabot_update-alert",
    "secret scanning alerts of a repository": "secret-scanning_list-alerts-for-repo",
    "add deploy key": "repos_create-deploy-key",
    "commit status": "repos_create-commit-status",
    "create a webhook": "repos_create-webhook",
}
"""Written before the weights were chosen, and never used to choose them."""


@pytest.fixture(scope="module")
def gateway() -> Gateway:
    if not DOCUMENT.exists():
        pytest.skip(f"needs {DOCUMENT}")
    service = from_openapi(
        json.loads(DOCUMENT.read_bytes()), {"namespace": "github", "base_url": "http://127.0.0.1"}
    )
    return Gateway(OperationRegistry(service.operations))


@pytest.mark.parametrize("queries", [TUNED, UNSEEN], ids=["tuned", "unseen"])
async def test_a_query_in_plain_words_finds_the_operation(
    gateway: Gateway, queries: Mapping[str, str]
) -> None:
    operator = OperationContext(trusted=True)
    found = {query: await gateway.search(query, operator, limit=5) for query in queries}
    ranks = {
        query: [each.id for each in matches].index(f"github.{queries[query]}")
        if f"github.{queries[query]}" in {each.id for each in matches}
        else None
        for query, matches in found.items()
    }

    assert sum(rank == 0 for rank in ranks.values()) >= 20, ranks
    assert sum(rank is not None for rank in ranks.values()) >= 27, ranks


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("issues", "issu"),
        ("issue", "issu"),
        ("repositories", "repository"),
        ("merging", "merg"),
        ("merged", "merg"),
        ("stopping", "stop"),
        ("calling", "call"),
        ("status", "status"),
        ("address", "address"),
        ("ring", "ring"),
        ("ids", "ids"),
    ],
)
def test_inflected_forms_have_the_same_stem(word: str, expected: str) -> None:
    assert stem(word) == expected


def test_scores_never_rise_and_ties_prefer_the_plain_operation() -> None:
    specs = [
        OperationSpec(
            name=f"list{n}", namespace="task", type=OperationType.QUERY, description="List."
        )
        for n in range(150)
    ]
    ranked = list(Ranking(specs).ranked("list tasks"))

    scores = [round(score, 6) for _, score in ranked]
    assert len(ranked) == 150
    assert scores == sorted(scores, reverse=True)
    assert [len(spec.id) for spec, _ in ranked[:10]] == [len("task.list0")] * 10
