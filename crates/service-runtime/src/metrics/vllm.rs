//! vLLM's metrics that have a true value here, under vLLM's names, old names included. They are exposed on demand only.

use super::Unit::{Events, Fact, Ratio, Requests, Seconds, Tokens};
use super::edges::{REQUEST_TOKENS, vllm as edges};
use super::labels::{BLOCK_SIZE, ENGINE, FINISHED_REASON, MODEL_NAME, NUM_GPU_BLOCKS};
use super::{Label, Metric, Role};

const COORDINATOR: &[Role] = &[Role::Coordinator];
const NODES: &[Role] = &[Role::Prefill, Role::Decode];
const ALL_ROLES: &[Role] = &Role::ALL;
const OF_ENGINE: &[Label] = &[MODEL_NAME, ENGINE];

macro_rules! metrics {
    ($($name:ident = $metric:expr;)*) => {
        $(pub const $name: Metric = $metric;)*
        pub const ALL: &[Metric] = &[$($name),*];
    };
}

metrics! {
    TTFT = Metric::histogram(("vllm:time_to_first_token_seconds", edges::TTFT), Seconds, "First byte received to first token written")
        .by(OF_ENGINE).on(COORDINATOR);
    ITL = Metric::histogram(("vllm:inter_token_latency_seconds", edges::TOKEN_GAP), Seconds, "Gap between two tokens of one choice")
        .by(OF_ENGINE).on(COORDINATOR);
    ITL_OLD = Metric::histogram(("vllm:time_per_output_token_seconds", edges::TOKEN_GAP), Seconds,
        "Old name of inter_token_latency_seconds").by(OF_ENGINE).on(COORDINATOR);
    TPOT = Metric::histogram(("vllm:request_time_per_output_token_seconds", edges::TOKEN_GAP), Seconds,
        "(last token - first token) / (tokens - 1)").by(OF_ENGINE).on(COORDINATOR);
    E2E = Metric::histogram(("vllm:e2e_request_latency_seconds", edges::REQUEST_TIME), Seconds, "First byte received to the answer's end")
        .by(OF_ENGINE).on(COORDINATOR);
    QUEUE_TIME = Metric::histogram(("vllm:request_queue_time_seconds", edges::REQUEST_TIME), Seconds,
        "Waiting until a node begins with the prompt: the stages queue, route, reserve, dispatch, step_wait and prefill_queue")
        .by(OF_ENGINE).on(COORDINATOR);
    PREFILL_TIME = Metric::histogram(("vllm:request_prefill_time_seconds", edges::REQUEST_TIME), Seconds,
        "First prompt chunk scheduled to first token drawn").by(OF_ENGINE).on(COORDINATOR);
    DECODE_TIME = Metric::histogram(("vllm:request_decode_time_seconds", edges::REQUEST_TIME), Seconds,
        "First token written to the answer's end").by(OF_ENGINE).on(COORDINATOR);
    INFERENCE_TIME = Metric::histogram(("vllm:request_inference_time_seconds", edges::REQUEST_TIME), Seconds,
        "First prompt chunk scheduled to the answer's end").by(OF_ENGINE).on(COORDINATOR);
    REQUEST_PROMPT_TOKENS = Metric::histogram(("vllm:request_prompt_tokens", REQUEST_TOKENS), Tokens, "Prompt tokens of one request")
        .by(OF_ENGINE).on(COORDINATOR);
    REQUEST_GENERATION_TOKENS = Metric::histogram(("vllm:request_generation_tokens", REQUEST_TOKENS), Tokens, "Output tokens of one request")
        .by(OF_ENGINE).on(COORDINATOR);
    REQUEST_SUCCESS = Metric::counter("vllm:request_success", Requests, "Requests that ended after they were admitted, by finish reason")
        .by(&[MODEL_NAME, ENGINE, FINISHED_REASON]).on(COORDINATOR);
    PROMPT_TOKENS = Metric::counter("vllm:prompt_tokens", Tokens, "Prompt tokens of ended requests").by(OF_ENGINE).on(COORDINATOR);
    GENERATION_TOKENS = Metric::counter("vllm:generation_tokens", Tokens, "Output tokens of ended requests").by(OF_ENGINE).on(COORDINATOR);

    REQUESTS_RUNNING = Metric::gauge("vllm:num_requests_running", Requests, "Requests that run: placed ones, on a node sequences in its batch")
        .by(OF_ENGINE).on(ALL_ROLES);
    REQUESTS_WAITING = Metric::gauge("vllm:num_requests_waiting", Requests, "Requests that wait for a place, on a node for room in its batch")
        .by(OF_ENGINE).on(ALL_ROLES);
    KV_USAGE = Metric::gauge("vllm:kv_cache_usage_perc", Ratio, "Share of KV blocks that belong to a request or a transfer; 1 is all")
        .by(OF_ENGINE).on(NODES);
    KV_USAGE_OLD = Metric::gauge("vllm:gpu_cache_usage_perc", Ratio, "Old name of kv_cache_usage_perc").by(OF_ENGINE).on(NODES);
    PREEMPTIONS = Metric::counter("vllm:num_preemptions", Events, "Sequences evicted to free blocks").by(OF_ENGINE).on(NODES);
    DRAFTED_TOKENS = Metric::counter("vllm:spec_decode_num_draft_tokens", Tokens, "Tokens that running answers guessed").by(OF_ENGINE).on(NODES);
    ACCEPTED_TOKENS = Metric::counter("vllm:spec_decode_num_accepted_tokens", Tokens, "Guessed tokens that were equal to the drawn ones")
        .by(OF_ENGINE).on(NODES);
    PREFIX_QUERIES = Metric::counter("vllm:prefix_cache_queries", Tokens, "Prompt tokens looked up in the prefix cache").by(OF_ENGINE).on(NODES);
    PREFIX_QUERIES_OLD = Metric::counter("vllm:gpu_prefix_cache_queries", Tokens, "Old name of prefix_cache_queries").by(OF_ENGINE).on(NODES);
    PREFIX_HITS = Metric::counter("vllm:prefix_cache_hits", Tokens, "Prompt tokens found in the prefix cache").by(OF_ENGINE).on(NODES);
    PREFIX_HITS_OLD = Metric::counter("vllm:gpu_prefix_cache_hits", Tokens, "Old name of prefix_cache_hits").by(OF_ENGINE).on(NODES);
    ITERATION_TOKENS = Metric::histogram(("vllm:iteration_tokens_total", edges::ITERATION_TOKENS), Tokens, "Tokens of an engine step")
        .by(OF_ENGINE).on(NODES);
    CACHE_CONFIG = Metric::gauge("vllm:cache_config_info", Fact, "1; the labels tell how the KV pool is cut")
        .by(&[MODEL_NAME, ENGINE, BLOCK_SIZE, NUM_GPU_BLOCKS]).on(NODES);
}
