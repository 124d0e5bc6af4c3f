//! The table of baton's own metrics. Their names, helps, labels and edges are nowhere else.
//!
//! `docs/reference/metrics.md` is generated from it, and the tests of the three processes compare their expositions with
//! it. To add a metric, add a line here and its registration in the process. Then run `cargo run -p service-runtime
//! --example metrics_doc > docs/reference/metrics.md`.

use super::Unit::{Blocks, Bytes, Events, Fact, Nodes, Permits, Ratio, Requests, Seconds, Sequences, Tasks, Tokens};
use super::labels::*;
use super::{Metric, Role, edges};

const COORDINATOR: &[Role] = &[Role::Coordinator];
const PREFILL: &[Role] = &[Role::Prefill];
const NODES: &[Role] = &[Role::Prefill, Role::Decode];
const ALL_ROLES: &[Role] = &Role::ALL;

/// Makes the constants and the list of all of them at once, so that no constant is missing in the list.
macro_rules! metrics {
    ($($name:ident = $metric:expr;)*) => {
        $(pub const $name: Metric = $metric;)*
        pub const ALL: &[Metric] = &[$($name),*];
    };
}

// Requests, as their clients see them.
metrics! {
    REQUESTS = Metric::counter("baton_requests", Requests, "Generation requests that ended, by outcome")
        .by(&[MODEL, LANE, OUTCOME]).on(COORDINATOR);
    TTFT = Metric::histogram(("baton_ttft_seconds", edges::TTFT), Seconds, "First byte received to first token written")
        .by(&[LANE]).on(COORDINATOR);
    ITL = Metric::histogram(("baton_itl_seconds", edges::ITL), Seconds, "Gap between two tokens of one choice")
        .by(&[LANE]).on(COORDINATOR);
    TPOT = Metric::histogram(("baton_tpot_seconds", edges::ITL), Seconds, "(last token - first token) / (tokens - 1)")
        .by(&[LANE]).on(COORDINATOR);
    E2E = Metric::histogram(("baton_e2e_seconds", edges::E2E), Seconds,
        "First byte received to the answer's end, of requests that were given to a node")
        .by(&[LANE]).on(COORDINATOR);
    FIRST_TO_SECOND_TOKEN = Metric::histogram(("baton_first_to_second_token_seconds", edges::ITL), Seconds,
        "Time from the first token to the second, in which a client notices the handoff").on(COORDINATOR);
    LAST_TOKEN_TO_END = Metric::histogram(("baton_last_token_to_end_seconds", edges::STAGE), Seconds,
        "Last token written to the answer's end written").on(COORDINATOR);
    ITL_STALLS = Metric::counter("baton_itl_stalls", Events, "Gaps between tokens that are over four times the request's median gap, by cause")
        .by(&[LANE, STALL_CAUSE]).on(COORDINATOR);
    PROMPT_TOKENS = Metric::histogram(("baton_prompt_tokens", edges::REQUEST_TOKENS), Tokens,
        "Prompt tokens of one request that was given to a node").on(COORDINATOR);
    OUTPUT_TOKENS = Metric::histogram(("baton_output_tokens", edges::REQUEST_TOKENS), Tokens,
        "Output tokens of one request that was given to a node").on(COORDINATOR);
    SLO_TOTAL = Metric::counter("baton_slo", Requests, "Requests judged by an SLO profile")
        .by(&[SLO, LANE]).on(COORDINATOR);
    SLO_GOOD = Metric::counter("baton_slo_good", Requests, "Requests that kept every limit of their SLO profile")
        .by(&[SLO, LANE]).on(COORDINATOR);
    SLO_BREACHES = Metric::counter("baton_slo_breaches", Events, "Limits that judged requests broke; a request counts once for each kind of limit")
        .by(&[SLO, LANE, BREACH]).on(COORDINATOR);
    SLO_OBJECTIVE = Metric::gauge("baton_slo_objective", Ratio, "Share of requests that must be good (the objective)").on(COORDINATOR);
    HANDLER_PANICS = Metric::counter("baton_handler_panics", Requests, "Requests whose handler panicked, which is an error in baton").on(COORDINATOR);
    KEY_REFUSALS = Metric::counter("baton_key_refusals", Requests,
        "Requests refused because of their key, or because they had none, by the error's code or the limit; baton_requests_total does not count them").by(&[KEY_REFUSAL]).on(COORDINATOR);

    STAGE_SECONDS = Metric::histogram(("baton_stage_seconds", edges::STAGE), Seconds,
        "Time of requests in each stage; on the coordinator phase ttft sums to TTFT").by(&[STAGE, PHASE]).on(ALL_ROLES);
    STAGE_REQUESTS = Metric::gauge("baton_stage_requests", Requests,
        "Requests in each stage now; prefill_forward on the coordinator includes step_wait and prefill_queue").by(&[LIVE_STAGE, PHASE]).on(ALL_ROLES);

    QUEUE_REQUESTS = Metric::gauge("baton_queue_requests", Requests, "Requests that wait at the coordinator for a place on nodes").by(&[LANE]).on(COORDINATOR);
    UNFINISHED_REQUESTS = Metric::gauge("baton_unfinished_requests", Requests, "Requests admitted and not ended").on(COORDINATOR);
    SHED = Metric::counter("baton_shed", Requests, "Requests turned away for want of room or time").by(&[LANE]).on(COORDINATOR);
    ROUTING_DECISIONS = Metric::counter("baton_routing_decisions", Events, "Choices of a node, by policy and reason")
        .by(&[POLICY, ROUTE_REASON]).on(COORDINATOR);
    LOCAL_PREFILLS = Metric::counter("baton_local_prefills", Requests, "Prompts computed on a decode node, by reason")
        .by(&[LOCAL_PREFILL_REASON]).on(&[Role::Coordinator, Role::Decode]);
    HANDOFFS = Metric::counter("baton_handoffs", Events, "Handoffs that ended, by outcome as this process sees it")
        .by(&[HANDOFF_TRANSPORT, HANDOFF_OUTCOME]).on(ALL_ROLES);
    HANDOFF_RETRIES = Metric::counter("baton_handoff_retries", Events, "Attempts that followed a failed one, by the reason of the failure")
        .by(&[RETRY_REASON]).on(COORDINATOR);
    MIGRATIONS = Metric::counter("baton_migrations", Events, "Requests that had to move to other nodes after their first token, by outcome")
        .by(&[MIGRATION_OUTCOME]).on(COORDINATOR);
    NODE_REFUSALS = Metric::counter("baton_node_refusals", Events, "Times that a node refused work, by reason; the request was queued again")
        .by(&[REFUSE_REASON]).on(COORDINATOR);
    PAIR_RESTS = Metric::counter("baton_pair_rests", Events,
        "Pairs taken out of use for a while because their transfers kept failing").on(COORDINATOR);
    NODE_RESTS = Metric::counter("baton_node_rests", Events,
        "Nodes set aside for a while because their engine kept failing requests").on(COORDINATOR);
    STALE_EVENTS = Metric::counter("baton_stale_events", Events, "Events from attempts that had already ended, which have no effect").on(COORDINATOR);
    PROTOCOL_VIOLATIONS = Metric::counter("baton_protocol_violations", Events, "Messages of nodes that broke the protocol").on(COORDINATOR);
    ILLEGAL_TRANSITIONS = Metric::counter("baton_illegal_transitions", Events, "Steps of requests that the coordinator's state machine refused, which is an error in baton").on(COORDINATOR);

    NODE_UP = Metric::gauge("baton_node_up", Nodes, "Nodes by role and state").by(&[NODE_ROLE, NODE_STATE]).on(COORDINATOR);
    NODES_LOST = Metric::counter("baton_nodes_lost", Events, "Nodes whose lease ran out: their requests were placed anew").on(COORDINATOR);
    CLUSTER_KV_BLOCKS = Metric::gauge("baton_kv_blocks", Blocks, "KV blocks of every node by state")
        .by(&[NODE, NODE_ROLE, BLOCK_STATE]).on(COORDINATOR);
    MEMBERSHIP_LEASE = Metric::gauge("baton_membership_lease_seconds", Seconds, "Time left on a node's lease")
        .by(&[NODE, NODE_ROLE]).on(COORDINATOR);
    BREAKER_STATE = Metric::gauge("baton_breaker_state", Fact, "1 while a node is set aside after broken connections or failures of its engine")
        .by(&[NODE, NODE_ROLE]).on(COORDINATOR);
    NODE_RUNNING_SEQUENCES = Metric::gauge("baton_node_running_sequences", Sequences, "Sequences in the node's batch")
        .by(&[NODE, NODE_ROLE]).on(COORDINATOR);
    NODE_WAITING_SEQUENCES = Metric::gauge("baton_node_waiting_sequences", Sequences, "Sequences waiting on the node")
        .by(&[NODE, NODE_ROLE]).on(COORDINATOR);
    NODE_PERMITS_AVAILABLE = Metric::gauge("baton_node_permits_available", Permits,
        "Work the node would take now: prompt tokens (prefill) or blocks (decode)").by(&[NODE, NODE_ROLE]).on(COORDINATOR);
    PAIR_UP = Metric::gauge("baton_pair_up", Fact, "1 while a prefill node can push KV to a decode node")
        .by(&[PREFILL_NODE, DECODE_NODE, PAIR_REASON]).on(COORDINATOR);
    NODE_PREEMPTIONS = Metric::counter("baton_node_preemptions", Events, "Sequences evicted to free blocks, by node")
        .by(&[NODE, NODE_ROLE]).on(COORDINATOR);
    NODE_PREFIX_QUERIES = Metric::counter("baton_node_prefix_queries_tokens", Tokens, "Prompt tokens looked up in prefix caches, by node")
        .by(&[NODE, NODE_ROLE]).on(COORDINATOR);
    NODE_PREFIX_HITS = Metric::counter("baton_node_prefix_hits_tokens", Tokens, "Prompt tokens found in prefix caches, by node")
        .by(&[NODE, NODE_ROLE]).on(COORDINATOR);
    NODE_PREFIX_BLOCKS = Metric::gauge("baton_node_prefix_blocks", Blocks, "Blocks in the node's prefix cache, used or not, that the prefix directory knows of")
        .by(&[NODE, NODE_ROLE]).on(COORDINATOR);

    KV_BLOCKS = Metric::gauge("baton_kv_blocks", Blocks, "KV blocks of this node by state; the sum over all states is the size of its pool")
        .by(&[BLOCK_STATE]).on(NODES);
    PREFIX_QUERIES = Metric::counter("baton_prefix_queries_tokens", Tokens, "Prompt tokens looked up in the prefix cache").on(NODES);
    PREFIX_HITS = Metric::counter("baton_prefix_hits_tokens", Tokens, "Prompt tokens found in the prefix cache").on(NODES);
    PREFIX_EVICTIONS = Metric::counter("baton_prefix_evictions", Events, "Cached blocks that were evicted because a block was needed").on(NODES);
    PREFIX_EVICTIONS_OVER_SHARE = Metric::counter("baton_prefix_evictions_over_share", Events,
        "Cached blocks that were evicted before older ones, because their tenant had its share of the cache (`--tenant-cache-percent`)").on(NODES);
    KV_TRANSFER_SECONDS = Metric::histogram(("baton_kv_transfer_seconds", edges::TRANSFER), Seconds,
        "Time to move the bytes of one handoff: on a prefill node what the pair spent on them, on a decode node first to last frame")
        .by(&[MOVED_BY, SRC_ROLE]).on(NODES);
    KV_TRANSFER_BYTES = Metric::histogram(("baton_kv_transfer_bytes", edges::KV_BYTES), Bytes, "KV bytes of one handoff")
        .by(&[MOVED_BY, SRC_ROLE]).on(NODES);
    KV_TRANSFER_FAILURES = Metric::counter("baton_kv_transfer_failures", Events, "Handoffs that failed, by reason")
        .by(&[CARRIER, SRC_ROLE, TRANSFER_FAILURE]).on(NODES);
    KV_TRANSPORT_FALLBACKS = Metric::counter("baton_kv_transport_fallbacks", Events,
        "Pairs that were made without the transport this node prefers, by reason").by(&[WANTED_TRANSPORT, FALLBACK_REASON]).on(PREFILL);
    KV_TRANSPORT_RETRIES = Metric::counter("baton_kv_transport_retries", Events,
        "Later tries of a better transport for a pair that was made without it, by how they ended")
        .by(&[RETRIED_TRANSPORT, TRANSPORT_RETRY_OUTCOME]).on(PREFILL);
    PUSH_QUEUE_BLOCKS = Metric::gauge("baton_push_queue_blocks", Blocks, "Computed blocks that wait to be pushed").on(PREFILL);
    PREFILL_REQUESTS = Metric::counter("baton_prefill_requests", Requests, "Requests that ended on a prefill node, by outcome")
        .by(&[REQUEST_TRANSPORT, PREFILL_OUTCOME]).on(PREFILL);

    RUNNING = Metric::gauge("baton_running", Sequences, "Sequences in the batch: prompts on a prefill node, answers on a decode node").on(NODES);
    WAITING = Metric::gauge("baton_waiting", Sequences, "Sequences accepted that wait for room in the batch").by(&[WAITING_REASON]).on(NODES);
    BATCH_TOKENS = Metric::histogram(("baton_batch_tokens", edges::STEP_TOKENS), Tokens, "Tokens of an engine step").on(NODES);
    BATCH_SIZE = Metric::histogram(("baton_batch_size", edges::STEP_SEQUENCES), Sequences, "Sequences of an engine step").on(NODES);
    STEP_SECONDS = Metric::histogram(("baton_step_seconds", edges::STEP), Seconds, "Time of an engine step").on(NODES);
    PREEMPTIONS = Metric::counter("baton_preemptions", Events, "Sequences evicted to free blocks; always 0 on a prefill node").on(NODES);
    DRAFTED_TOKENS = Metric::counter("baton_drafted_tokens", Tokens, "Tokens that running answers guessed (`--speculative-tokens`)").on(NODES);
    ACCEPTED_TOKENS = Metric::counter("baton_accepted_tokens", Tokens, "Guessed tokens that were equal to the drawn ones").on(NODES);
    DEVICE_MEMORY = Metric::gauge("baton_device_memory_bytes", Bytes,
        "GPU memory when the engine had started, by use, and what was free; only on a node with a GPU").by(&[MEMORY_KIND]).on(NODES);

    MEMBERSHIP_REGISTERED = Metric::gauge("baton_membership_registered", Fact,
        "1 while this process's entry is in etcd; always 1 with embedded membership").on(ALL_ROLES);
    MEMBERSHIP_VIEW_STALE = Metric::gauge("baton_membership_view_stale", Fact,
        "1 while this process hears nothing from etcd; requests go on with the members that it knew last").on(ALL_ROLES);

    RUNTIME_TASKS = Metric::gauge("baton_runtime_tasks", Tasks, "Tasks alive on the async runtime").on(ALL_ROLES);
}
