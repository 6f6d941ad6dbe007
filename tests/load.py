"""The tests that may be repeated, because their outcome depends on how busy the machine is.

All other tests run once. A test belongs here only if it checks a promise about time, memory or throughput that cannot
be stated without measuring; the reason says which. A test that only needs longer on a busy machine gets a longer
limit.
"""

REPEATED = {
    "calls/test_faults_of_brokers.py::test_f5_an_unavailable_broker_fails_calls_and_uses_no_memory": (
        "F5 promises a bound on memory, measured as the resident size of the process"
    ),
    "calls/test_faults_of_load.py::test_f9_a_process_that_stops_reading_loses_nothing_and_buffers_little": (
        "F9 promises a bound on memory, measured as the resident size of the process"
    ),
    "calls/test_soak.py::test_f32_mixed_load_with_faults_leaks_nothing": (
        "F32 promises a bound on memory and failures in less than 2 % of calls while connections are cut"
    ),
    "hub/test_soak.py::test_sources_that_come_and_go_leak_nothing": (
        "a leak is measured as the growth of the resident size of the process"
    ),
    "server/test_idle.py::test_ten_thousand_idle_connections_block_no_client_and_are_closed": (
        "R18 promises a bound on memory for 10,000 connections, which two processes open at once"
    ),
}
"""Names below tests/, without parameters, and reasons."""

REPEATS = 2
