//! A gauge of the async runtime that every process exposes. A leak of streams or transfers shows there first.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use tokio::runtime::Handle;

use crate::metrics::table;

/// Adds the gauge for the runtime of the caller. Outside of a runtime there is nothing to count.
pub fn register(registry: &mut Registry) {
    if let Ok(runtime) = Handle::try_current() {
        registry.register_collector(Box::new(RuntimeTasks { runtime }));
    }
}

#[derive(Debug)]
struct RuntimeTasks {
    runtime: Handle,
}

impl Collector for RuntimeTasks {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let tasks = ConstGauge::new(i64::try_from(self.runtime.metrics().num_alive_tasks()).unwrap_or(i64::MAX));
        table::RUNTIME_TASKS.encode(&mut encoder, |metric| tasks.encode(metric))
    }
}
