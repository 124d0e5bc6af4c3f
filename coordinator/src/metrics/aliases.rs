//! The coordinator's measurements of requests under vLLM's names.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use service_runtime::metrics::vllm_node::EngineLabels;
use service_runtime::metrics::{Histograms, Metric, labels, vllm};
use serving_core::request::{RejectReason, RequestError};
use serving_core::stage::Stage;

use crate::api::EndedRequest;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FinishLabels {
    model_name: String,
    engine: &'static str,
    finished_reason: &'static str,
}

/// vLLM waits in one queue. A request of baton passes these stages before a node begins with it.
const WAITING_STAGES: [Stage; 6] = [
    Stage::Queue,
    Stage::Route,
    Stage::Reserve,
    Stage::Dispatch,
    Stage::StepWait,
    Stage::PrefillQueue,
];

/// There is one served model, so each family has one set of labels.
#[derive(Debug)]
pub struct Aliases {
    model: EngineLabels,
    ttft: Histogram,
    itl: Histogram,
    tpot: Histogram,
    e2e: Histogram,
    queue_time: Histogram,
    prefill_time: Histogram,
    decode_time: Histogram,
    inference_time: Histogram,
    request_prompt_tokens: Histogram,
    request_generation_tokens: Histogram,
    success: Family<FinishLabels, Counter>,
    prompt_tokens: Counter,
    generation_tokens: Counter,
}

impl Aliases {
    pub fn register(registry: &mut Registry, model_name: &str) -> Self {
        let model = EngineLabels::new(model_name);
        // An old name and a new name are one histogram in two families.
        let histogram = |registry: &mut Registry, names: &[Metric]| {
            let family: Histograms<EngineLabels> = names[0].new_histograms();
            for name in names {
                name.register(registry, family.clone());
            }
            family.get_or_create_owned(&model)
        };
        let counter = |registry: &mut Registry, name: &Metric| {
            let family = Family::<EngineLabels, Counter>::default();
            name.register(registry, family.clone());
            family.get_or_create_owned(&model)
        };
        let success = Family::default();
        vllm::REQUEST_SUCCESS.register(registry, success.clone());
        let aliases = Self {
            ttft: histogram(registry, &[vllm::TTFT]),
            itl: histogram(registry, &[vllm::ITL, vllm::ITL_OLD]),
            tpot: histogram(registry, &[vllm::TPOT]),
            e2e: histogram(registry, &[vllm::E2E]),
            queue_time: histogram(registry, &[vllm::QUEUE_TIME]),
            prefill_time: histogram(registry, &[vllm::PREFILL_TIME]),
            decode_time: histogram(registry, &[vllm::DECODE_TIME]),
            inference_time: histogram(registry, &[vllm::INFERENCE_TIME]),
            request_prompt_tokens: histogram(registry, &[vllm::REQUEST_PROMPT_TOKENS]),
            request_generation_tokens: histogram(registry, &[vllm::REQUEST_GENERATION_TOKENS]),
            prompt_tokens: counter(registry, &vllm::PROMPT_TOKENS),
            generation_tokens: counter(registry, &vllm::GENERATION_TOKENS),
            success,
            model,
        };
        for reason in labels::FINISHED_REASONS {
            let _ = aliases.success.get_or_create(&aliases.finish_labels(reason));
        }
        aliases
    }

    fn finish_labels(&self, finished_reason: &'static str) -> FinishLabels {
        FinishLabels {
            model_name: self.model.model_name.clone(),
            engine: self.model.engine,
            finished_reason,
        }
    }

    pub fn token_gap(&self, gap: Duration) {
        self.itl.observe(gap.as_secs_f64());
    }

    pub fn request_ended(&self, ended: &EndedRequest<'_>) {
        let Some(reason) = finished_reason(ended) else { return };
        self.success.get_or_create(&self.finish_labels(reason)).inc();
        self.prompt_tokens.inc_by(u64::from(ended.prompt_tokens));
        self.generation_tokens.inc_by(u64::from(ended.output_tokens));
        self.request_prompt_tokens.observe(f64::from(ended.prompt_tokens));
        self.request_generation_tokens.observe(f64::from(ended.output_tokens));
        self.e2e.observe(ended.e2e.as_secs_f64());
        if let Some(tpot) = ended.tpot {
            self.tpot.observe(tpot.as_secs_f64());
        }
        let Some(ttft) = ended.ttft else { return };
        self.ttft.observe(ttft.as_secs_f64());
        let decode = ended.e2e.saturating_sub(ttft);
        self.decode_time.observe(decode.as_secs_f64());
        // The nodes' stages are unknown for a request that was broken off.
        if let Some(prefill) = ended.stages.get(Stage::PrefillForward) {
            let waited: Duration = WAITING_STAGES.iter().filter_map(|stage| ended.stages.get(*stage)).sum();
            self.queue_time.observe(waited.as_secs_f64());
            self.prefill_time.observe(prefill.as_secs_f64());
            self.inference_time.observe((prefill + decode).as_secs_f64());
        }
    }
}

/// `None` for a request that never ran. vLLM does not count those as finished.
fn finished_reason(ended: &EndedRequest<'_>) -> Option<&'static str> {
    match ended.outcome {
        "ok" => Some(ended.finish.unwrap_or("stop")),
        // A client that left before its request was admitted leaves nothing to count.
        "cancelled" if ended.stages.get(Stage::Tokenize).is_none() => None,
        "cancelled" => Some("abort"),
        // An answer that the end of a drain cut off, and no request that a drain turned away.
        "draining" if ended.output_tokens > 0 => Some("abort"),
        outcome if RejectReason::NAMES.contains(&outcome) => None,
        outcome if RequestError::NAMES.contains(&outcome) => Some("error"),
        _ => None,
    }
}
