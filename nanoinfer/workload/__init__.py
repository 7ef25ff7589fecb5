"""What clients send, and when: arrival times, prompts and lengths, seeded or read from files.

Read ``items`` first (one request as a :class:`~nanoinfer.workload.items.WorkItem`, and how they are made), then
``arrivals`` (when they come) and ``files`` (recorded lengths, prompts and traces).
"""
