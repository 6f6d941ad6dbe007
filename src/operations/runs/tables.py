"""The tables of a journal.

Rule 1: changes only add: a process of an older version can work beside one of a newer version.
Rule 2: a process that finds a newer version may read, but executes nothing.
"""

from typing import Final

from operations.runs.database import Connection, Database

VERSION: Final = 1

_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    # `wake` is when a run wants to be worked on: 0 for now, NULL if it waits for an answer or has ended.
    """CREATE TABLE IF NOT EXISTS runs (
        id TEXT PRIMARY KEY,
        operation TEXT NOT NULL,
        digest TEXT NOT NULL,
        input {blob} NOT NULL,
        caller {blob} NOT NULL,
        owner TEXT NOT NULL,
        agent TEXT NOT NULL,
        account TEXT,
        key TEXT,
        status TEXT NOT NULL,
        created BIGINT NOT NULL,
        updated BIGINT NOT NULL,
        expires BIGINT,
        retention BIGINT,
        revision BIGINT NOT NULL,
        wake BIGINT,
        priority BIGINT NOT NULL,
        lane TEXT NOT NULL,
        lane_limit BIGINT,
        holder TEXT,
        fence BIGINT NOT NULL,
        attempt BIGINT NOT NULL,
        crashes BIGINT NOT NULL,
        cause TEXT,
        cancelled_by TEXT,
        progress {blob},
        message TEXT,
        waiting {blob},
        result {blob},
        error {blob}
    )""",
    "CREATE UNIQUE INDEX IF NOT EXISTS runs_key ON runs (key) WHERE key IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS runs_ready ON runs (priority, created) WHERE wake = 0",
    "CREATE INDEX IF NOT EXISTS runs_wake ON runs (wake) WHERE wake > 0",
    "CREATE INDEX IF NOT EXISTS runs_holder ON runs (holder) WHERE holder IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS runs_lane ON runs (lane) WHERE holder IS NOT NULL AND lane_limit IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS runs_cancelled ON runs (holder) WHERE holder IS NOT NULL AND cancelled_by IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS runs_waiting ON runs (updated) WHERE status = 'input_required'",
    "CREATE INDEX IF NOT EXISTS runs_unknown ON runs (updated) WHERE status = 'unknown'",
    "CREATE INDEX IF NOT EXISTS runs_owner ON runs (owner, created)",
    "CREATE INDEX IF NOT EXISTS runs_live ON runs (owner) WHERE expires IS NULL",
    "CREATE INDEX IF NOT EXISTS runs_created ON runs (created)",
    "CREATE INDEX IF NOT EXISTS runs_expires ON runs (expires) WHERE expires IS NOT NULL",
    # `number` orders the steps as they began; `fence` is that of the attempt that began a step.
    """CREATE TABLE IF NOT EXISTS steps (
        run TEXT NOT NULL,
        name TEXT NOT NULL,
        parent TEXT NOT NULL,
        operation TEXT NOT NULL,
        kind TEXT NOT NULL,
        fence BIGINT NOT NULL,
        begun BIGINT NOT NULL,
        ended BIGINT,
        result {blob},
        error {blob},
        answered_by TEXT,
        PRIMARY KEY (run, name)
    )""",
    """CREATE TABLE IF NOT EXISTS questions (
        run TEXT NOT NULL,
        key TEXT NOT NULL,
        kind TEXT NOT NULL,
        request {blob} NOT NULL,
        until BIGINT,
        answer {blob},
        answered_by TEXT,
        created BIGINT NOT NULL,
        PRIMARY KEY (run, key)
    )""",
    """CREATE TABLE IF NOT EXISTS signals (
        run TEXT NOT NULL,
        name TEXT NOT NULL,
        number BIGINT NOT NULL,
        value {blob} NOT NULL,
        taken TEXT,
        PRIMARY KEY (run, name, number)
    )""",
    "CREATE INDEX IF NOT EXISTS questions_answered ON questions (run) WHERE answer IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS questions_approval ON questions (run) WHERE kind = 'approval'",
    "CREATE INDEX IF NOT EXISTS signals_untaken ON signals (run) WHERE taken IS NULL",
    """CREATE TABLE IF NOT EXISTS executors (
        id TEXT PRIMARY KEY,
        boot TEXT NOT NULL,
        expires BIGINT NOT NULL
    )""",
)


def create_tables(database: Database, connection: Connection) -> int:
    """Create the tables that are missing; return the version of the tables, which may be newer than `VERSION`."""
    found = _version(connection)
    if found >= VERSION:
        # The user of the database may not be allowed to create tables.
        return found
    connection.begin(writes=True)
    try:
        database.lock_all(connection, "tables")
        for sql in _TABLES:
            connection.count(sql.format(blob=database.blob))
        connection.count(
            "INSERT INTO meta (name, value) VALUES ('version', ?) ON CONFLICT (name) DO NOTHING",
            str(VERSION),
        )
        connection.commit()
    except BaseException:
        connection.rollback()
        raise
    return _version(connection)


def _version(connection: Connection) -> int:
    """Return the version of the tables; 0 if there are none."""
    connection.begin(writes=False)
    try:
        ((found,),) = connection.rows("SELECT value FROM meta WHERE name = 'version'")
    except Exception:  # noqa: BLE001 - each database has its own error for a missing table
        found = 0
    connection.rollback()
    return int(found)
