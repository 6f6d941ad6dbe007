"""The ground: JSON, text, time, errors. It knows no operation and opens no socket."""
