"""The per-device function: ops as lax calls on local arrays, collectives, and ops that are emitted as they are."""
