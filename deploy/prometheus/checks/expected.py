"""Metrics that a healthy cluster under load does not show. Everything else in rules, panels and triggers must be there."""

# Agreed, and not in the product yet. A query of these may return nothing. Delete a line when its metric lands: the check
# says so when it sees one. Name -> labels.
PENDING = {}

# Counters whose series appear with their first event, and the event is a fault or a rare choice: none, since counters with
# closed labels start at 0. One with an open label (a node's name) would stand here. Name -> labels, file that declares it.
QUIET = {}
