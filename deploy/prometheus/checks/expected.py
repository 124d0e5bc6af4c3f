"""Metrics that a healthy cluster under load does not show. Everything else in rules, panels and triggers must be there."""

# Agreed, and not in the product yet. A query of these may return nothing. Delete a line when its metric lands: the check
# says so when it sees one. Name -> labels.
PENDING = {
    "baton_stage_requests": {"stage", "phase"},
}

# Counters whose series appear with their first event, and the event is a fault or a rare choice. The source file is
# where the name and the labels are declared: the check reads it, so a renamed counter is found. Name -> labels, file.
QUIET = {
    "baton_shed_total": ({"lane"}, "coordinator/src/cluster_metrics.rs"),
    "baton_handoff_retries_total": ({"reason"}, "coordinator/src/cluster_metrics.rs"),
    "baton_migrations_total": ({"outcome"}, "coordinator/src/cluster_metrics.rs"),
    "baton_local_prefills_total": ({"reason"}, "coordinator/src/cluster_metrics.rs"),
    "baton_kv_transfer_failures_total": ({"transport", "src_role", "reason"}, "prefill-node/src/metrics.rs"),
    "baton_kv_transport_fallbacks_total": ({"transport", "reason"}, "prefill-node/src/metrics.rs"),
}
