//! Records every span. `OTEL_TRACES_SAMPLER` only decides whether a collector gets it.

use opentelemetry::trace::{Link, SpanKind, TraceId};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{Sampler, SamplingDecision, SamplingResult, ShouldSample};
use thiserror::Error;

#[derive(Debug, Error)]
#[error(
    "OTEL_TRACES_SAMPLER={name} is not known: write always_on, always_off, traceidratio or one of these after parentbased_, and the ratio in OTEL_TRACES_SAMPLER_ARG"
)]
pub struct UnknownSampler {
    name: String,
}

/// The sampler that the environment asks for. If it is not set: the caller's decision, else all.
///
/// # Errors
/// A name that the OpenTelemetry specification does not have.
pub fn from_env(env: &dyn Fn(&str) -> Option<String>) -> Result<RecordAll, UnknownSampler> {
    let ratio = env("OTEL_TRACES_SAMPLER_ARG")
        .and_then(|text| text.parse::<f64>().ok())
        .unwrap_or(1.0);
    let name = env("OTEL_TRACES_SAMPLER").filter(|name| !name.is_empty());
    let name = name.as_deref().unwrap_or("parentbased_always_on");
    let (is_parent_based, root) = match name.strip_prefix("parentbased_") {
        Some(root) => (true, root),
        None => (false, name),
    };
    let root = match root {
        "always_on" => Sampler::AlwaysOn,
        "always_off" => Sampler::AlwaysOff,
        "traceidratio" => Sampler::TraceIdRatioBased(ratio),
        _ => return Err(UnknownSampler { name: name.to_owned() }),
    };
    let exports = if is_parent_based {
        Sampler::ParentBased(Box::new(root))
    } else {
        root
    };
    Ok(RecordAll { exports })
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct RecordAll {
    exports: Sampler,
}

impl ShouldSample for RecordAll {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace: TraceId,
        name: &str,
        kind: &SpanKind,
        attributes: &[KeyValue],
        links: &[Link],
    ) -> SamplingResult {
        let mut result = self.exports.should_sample(parent, trace, name, kind, attributes, links);
        if result.decision == SamplingDecision::Drop {
            result.decision = SamplingDecision::RecordOnly;
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(name: &str, ratio: &str) -> SamplingDecision {
        let env = |key: &str| match key {
            "OTEL_TRACES_SAMPLER" => Some(name.to_owned()),
            "OTEL_TRACES_SAMPLER_ARG" => Some(ratio.to_owned()),
            _ => None,
        };
        let sampler = from_env(&env).unwrap();
        sampler
            .should_sample(None, TraceId::from(7), "x", &SpanKind::Server, &[], &[])
            .decision
    }

    #[test]
    fn nothing_is_dropped_and_what_is_exported_is_as_asked() {
        assert_eq!(decision("", ""), SamplingDecision::RecordAndSample);
        assert_eq!(decision("always_off", ""), SamplingDecision::RecordOnly);
        assert_eq!(decision("parentbased_always_off", ""), SamplingDecision::RecordOnly);
        assert_eq!(decision("traceidratio", "0"), SamplingDecision::RecordOnly);
        assert_eq!(
            decision("parentbased_traceidratio", "1"),
            SamplingDecision::RecordAndSample
        );
        assert!(from_env(&|_| Some("sometimes".to_owned())).is_err());
    }
}
