"""Forms of schemas of other projects: they lose no data, and each is built in bounded time."""

import json
from typing import Any

import pytest
from tests.console.conftest import PROJECT, Eyes

SHARED = PROJECT.parent / "shared"
SUITE = SHARED / "json-schema-test-suite" / "tests" / "draft2020-12"
DOCUMENTS = SHARED / "openapi"

# Writes each value into the form of its schema and reads it back.
ROUND_TRIP = """async (groups) => {
  const { Form } = await import("/~console/form.js");
  const lost = [];
  for (const { schema, values } of groups) {
    for (const value of values) {
      const form = new Form(schema, () => {});
      form.write(value);
      const read = form.read();
      form.blame([{ steps: ["a", "0"], message: "wrong" }]);
      if (!holds(read, value)) lost.push(JSON.stringify({ schema, value, read }));
    }
  }
  return lost;

  // A form may add what can be nothing else: here, a required null.
  function holds(read, value) {
    if (JSON.stringify(read) === JSON.stringify(value)) return true;
    if (typeof read !== "object" || typeof value !== "object" || read === null || value === null) return false;
    return Array.isArray(read) === Array.isArray(value)
      && Object.keys(value).every((name) => Object.hasOwn(read, name) && holds(read[name], value[name]))
      && Object.keys(read).every((name) => Object.hasOwn(value, name) || read[name] === null);
  }
}"""

# Makes the form of each schema, with everything in it opened once, and gives the slowest.
BUILD = """async (schemas) => {
  const { Form } = await import("/~console/form.js");
  const { schemaView } = await import("/~console/schema-view.js");
  let slowest = { ms: 0, name: "" };
  for (const [name, schema] of schemas) {
    const began = performance.now();
    const form = new Form(schema, () => {});
    for (const button of form.element.querySelectorAll(".tools button, .add")) button.click();
    form.write(form.read());
    schemaView(schema);
    const ms = performance.now() - began;
    if (ms > slowest.ms) slowest = { ms, name };
  }
  return slowest;
}"""


def groups() -> list[dict[str, Any]]:
    return [
        {"schema": group["schema"], "values": [test["data"] for test in group["tests"]]}
        for file in sorted(SUITE.rglob("*.json"))
        for group in json.loads(file.read_text(encoding="utf-8"))
    ]


@pytest.mark.skipif(not SUITE.exists(), reason="the JSON Schema test suite is not here")
def test_every_value_written_into_a_form_can_be_read_from_it(eyes: Eyes) -> None:
    page = eyes.open()

    assert page.evaluate(ROUND_TRIP, groups()) == []


@pytest.mark.skipif(not DOCUMENTS.exists(), reason="the OpenAPI documents are not here")
def test_forms_of_large_apis_are_there_at_once(eyes: Eyes) -> None:
    page = eyes.open()
    documents = sorted(DOCUMENTS.glob("*.json"), key=lambda file: -file.stat().st_size)[1:6]
    schemas = []
    for file in documents:
        components = json.loads(file.read_text(encoding="utf-8")).get("components", {})
        for name in list(components.get("schemas", {}))[:60]:
            root = {"$ref": f"#/components/schemas/{name}", "components": components}
            schemas.append((f"{file.name} {name}", root))
    assert len(schemas) > 100

    slowest = {"ms": 0.0}
    for start in range(0, len(schemas), 60):
        found = page.evaluate(BUILD, schemas[start : start + 60])
        slowest = max(slowest, found, key=lambda one: one["ms"])
    assert slowest["ms"] < 5000, slowest
