//! The gauge every process exposes of its async runtime: a leak of streams or transfers shows there first.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use tokio::runtime::Handle;

/// Adds the gauge for the runtime this is called on; outside of one there is nothing to count. `name` comes out as
/// `baton_runtime_tasks`: without the prefix where the registry adds it.
pub fn register(registry: &mut Registry, name: &'static str) {
    if let Ok(runtime) = Handle::try_current() {
        registry.register_collector(Box::new(RuntimeTasks { runtime, name }));
    }
}

#[derive(Debug)]
struct RuntimeTasks {
    runtime: Handle,
    name: &'static str,
}

impl Collector for RuntimeTasks {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let tasks = ConstGauge::new(i64::try_from(self.runtime.metrics().num_alive_tasks()).unwrap_or(i64::MAX));
        let help = "Tasks alive on the async runtime";
        let metric = encoder.encode_descriptor(self.name, help, None, MetricType::Gauge)?;
        tasks.encode(metric)
    }
}
