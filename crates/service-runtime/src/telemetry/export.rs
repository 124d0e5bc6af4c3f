//! The effect of the standard `OTEL_*` variables on a process's spans: their service, and whether and how a collector gets
//! them.

use opentelemetry::KeyValue;
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{BatchConfigBuilder, BatchSpanProcessor, SdkTracerProvider};

use super::{Identity, TelemetryError};
use crate::spans::{KeepSpans, sampler};

/// Spans that may wait to be exported. They come in bursts of up to two queues of `spans::recorder`, which the SDK's
/// default of 2,048 does not hold. `OTEL_BSP_MAX_QUEUE_SIZE` wins.
const EXPORT_QUEUE_SPANS: usize = 8192;

/// Every span is kept for a while. Spans of sampled traces (`OTEL_TRACES_SAMPLER`) are exported too.
pub(super) fn provider(identity: Identity<'_>) -> Result<SdkTracerProvider, TelemetryError> {
    let env = |name: &str| std::env::var(name).ok();
    let keep = KeepSpans::start(exporter(&env)?, identity.flavors).map_err(TelemetryError::Recorder)?;
    Ok(SdkTracerProvider::builder()
        .with_resource(resource(identity))
        .with_sampler(sampler::from_env(&env)?)
        .with_span_processor(keep)
        .build())
}

pub(super) fn resource(identity: Identity<'_>) -> Resource {
    // The default builder reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
    let mut builder = Resource::builder().with_attributes([
        KeyValue::new("service.instance.id", identity.instance.to_owned()),
        KeyValue::new("service.version", identity.version),
        KeyValue::new("service.namespace", "baton"),
    ]);
    let attributes = std::env::var("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
    let is_named = std::env::var("OTEL_SERVICE_NAME").is_ok_and(|name| !name.is_empty())
        || attributes
            .split(',')
            .any(|pair| pair.trim_start().starts_with("service.name="));
    if !is_named {
        builder = builder.with_service_name(identity.service);
    }
    builder.build()
}

/// `None` where no collector is configured.
pub(super) fn exporter(env: &dyn Fn(&str) -> Option<String>) -> Result<Option<BatchSpanProcessor>, TelemetryError> {
    if !exports(env) {
        return Ok(None);
    }
    let exporter = match protocol(env)? {
        Protocol::Grpc => SpanExporter::builder().with_tonic().build()?,
        Protocol::HttpBinary => SpanExporter::builder().with_http().build()?,
    };
    // The builder has read the OTEL_BSP_* variables.
    let mut batches = BatchConfigBuilder::default();
    if env("OTEL_BSP_MAX_QUEUE_SIZE").is_none() {
        batches = batches.with_max_queue_size(EXPORT_QUEUE_SPANS);
    }
    let processor = BatchSpanProcessor::builder(exporter).with_batch_config(batches.build());
    Ok(Some(processor.build()))
}

pub(super) fn is_disabled(env: &dyn Fn(&str) -> Option<String>) -> bool {
    env("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
}

pub(super) fn exports(env: &dyn Fn(&str) -> Option<String>) -> bool {
    let set = |name| env(name).filter(|value| !value.is_empty());
    let is_none = set("OTEL_TRACES_EXPORTER").is_some_and(|value| value == "none");
    let has_endpoint =
        set("OTEL_EXPORTER_OTLP_ENDPOINT").is_some() || set("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").is_some();
    has_endpoint && !is_disabled(env) && !is_none
}

/// How spans travel to the collector.
pub(super) enum Protocol {
    Grpc,
    HttpBinary,
}

/// With another protocol the port would not understand the spans, and all of them would be lost with an obscure error.
pub(super) fn protocol(env: &dyn Fn(&str) -> Option<String>) -> Result<Protocol, TelemetryError> {
    for variable in ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"] {
        match env(variable).as_deref() {
            None | Some("") => {}
            Some("grpc") => return Ok(Protocol::Grpc),
            Some("http/protobuf") => return Ok(Protocol::HttpBinary),
            Some(value) => {
                let value = value.to_owned();
                return Err(TelemetryError::Protocol { variable, value });
            }
        }
    }
    Ok(Protocol::Grpc)
}
