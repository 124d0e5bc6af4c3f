//! The name, the meaning and the processes of every metric. `table` is the only place that has them.

pub mod config;
pub mod docs;
mod edges;
pub mod exposition;
pub mod labels;
pub mod membership;
pub mod node;
pub mod table;
pub mod vllm;
pub mod vllm_node;

use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{self, Registry};

/// Which process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    Coordinator,
    Prefill,
    Decode,
}

impl Role {
    pub const ALL: [Role; 3] = [Role::Coordinator, Role::Prefill, Role::Decode];

    pub fn name(self) -> &'static str {
        match self {
            Role::Coordinator => "coordinator",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    /// The kind, as in the exposition's `# TYPE`.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Seconds,
    Bytes,
    Tokens,
    Blocks,
    Requests,
    Sequences,
    Nodes,
    Tasks,
    /// Prompt tokens on a prefill node, blocks on a decode node.
    Permits,
    /// 0 to 1.
    Ratio,
    /// Events of the kind the name says.
    Events,
    /// 1 for yes, 0 for no.
    Fact,
}

impl Unit {
    pub fn name(self) -> &'static str {
        match self {
            Unit::Seconds => "seconds",
            Unit::Bytes => "bytes",
            Unit::Tokens => "tokens",
            Unit::Blocks => "blocks",
            Unit::Requests => "requests",
            Unit::Sequences => "sequences",
            Unit::Nodes => "nodes",
            Unit::Tasks => "tasks",
            Unit::Permits => "permits",
            Unit::Ratio => "ratio",
            Unit::Events => "events",
            Unit::Fact => "fact",
        }
    }
}

/// The values that a label can have.
#[derive(Clone, Copy, Debug)]
pub enum Values {
    /// A closed list of values. The list may differ by process.
    Closed(fn(Role) -> Vec<&'static str>),
    /// One value, or few, for the life of a process. The text says which.
    OfProcess(&'static str),
    /// As many values as there are nodes and the like. The text says which. There is never one for each request.
    Open(&'static str),
}

#[derive(Clone, Copy, Debug)]
pub struct Label {
    pub name: &'static str,
    pub values: Values,
}

/// One metric of one or more processes.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// The name as exposed, without the `_total` of a counter and the `_bucket`, `_sum`, `_count` of a histogram.
    pub name: &'static str,
    pub kind: Kind,
    pub unit: Unit,
    /// Without a full stop, which the exposition adds.
    pub help: &'static str,
    pub labels: &'static [Label],
    pub roles: &'static [Role],
    /// Upper edges of a histogram's buckets; empty for the others.
    pub edges: &'static [f64],
}

impl Metric {
    const fn new((name, kind): (&'static str, Kind), unit: Unit, help: &'static str) -> Self {
        Self {
            name,
            kind,
            unit,
            help,
            labels: &[],
            roles: &[],
            edges: &[],
        }
    }
    const fn counter(name: &'static str, unit: Unit, help: &'static str) -> Self {
        Self::new((name, Kind::Counter), unit, help)
    }
    const fn gauge(name: &'static str, unit: Unit, help: &'static str) -> Self {
        Self::new((name, Kind::Gauge), unit, help)
    }
    const fn histogram((name, edges): (&'static str, &'static [f64]), unit: Unit, help: &'static str) -> Self {
        Self {
            edges,
            ..Self::new((name, Kind::Histogram), unit, help)
        }
    }
    const fn by(self, labels: &'static [Label]) -> Self {
        Self { labels, ..self }
    }
    const fn on(self, roles: &'static [Role]) -> Self {
        Self { roles, ..self }
    }

    pub fn is_on(&self, role: Role) -> bool {
        self.roles.contains(&role)
    }

    /// The values of a label on this process. `None` when they are not a closed list.
    pub fn closed_values(&self, label: &str, role: Role) -> Option<Vec<&'static str>> {
        let label = self.labels.iter().find(|known| known.name == label)?;
        match label.values {
            Values::Closed(values) => Some(values(role)),
            Values::OfProcess(_) | Values::Open(_) => None,
        }
    }

    /// Adds a metric to a registry. There is no other way.
    pub fn register(&self, registry: &mut Registry, metric: impl registry::Metric) {
        let (name, unit) = self.name_and_unit();
        match unit {
            Some(unit) => registry.register_with_unit(name, self.help, unit, metric),
            None => registry.register(name, self.help, metric),
        }
    }

    /// The same for values that are counted elsewhere and read at scrape time: `write` writes the value or values.
    ///
    /// # Errors
    /// The exposition cannot be written.
    pub fn encode(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        write: impl FnOnce(MetricEncoder<'_>) -> std::fmt::Result,
    ) -> std::fmt::Result {
        let (name, unit) = self.name_and_unit();
        let kind = match self.kind {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge => MetricType::Gauge,
            Kind::Histogram => MetricType::Histogram,
        };
        // A registry adds the full stop, a collector does not.
        let help = format!("{}.", self.help);
        write(encoder.encode_descriptor(name, &help, unit.as_ref(), kind)?)
    }

    /// The exposition may name a unit only when the metric's name ends with it.
    fn name_and_unit(&self) -> (&'static str, Option<registry::Unit>) {
        let stem = self.name.strip_suffix(self.unit.name());
        match stem.and_then(|stem| stem.strip_suffix('_')) {
            Some(stem) => (stem, Some(registry::Unit::Other(self.unit.name().to_owned()))),
            None => (self.name, None),
        }
    }

    pub fn new_histogram(&self) -> Histogram {
        Edges(self.edges).new_metric()
    }

    pub fn new_histograms<L: Clone + std::hash::Hash + Eq>(&self) -> Histograms<L> {
        Family::new_with_constructor(Edges(self.edges))
    }

    pub fn new_histograms_with_exemplars<L, E>(&self) -> HistogramsWithExemplars<L, E>
    where
        L: Clone + std::hash::Hash + Eq,
    {
        Family::new_with_constructor(Edges(self.edges))
    }
}

pub type Histograms<L> = Family<L, Histogram, Edges>;
pub type HistogramsWithExemplars<L, E> = Family<L, HistogramWithExemplars<E>, Edges>;

/// Makes the histograms of a family.
#[derive(Clone, Copy, Debug)]
pub struct Edges(&'static [f64]);

impl MetricConstructor<Histogram> for Edges {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}
impl<E> MetricConstructor<HistogramWithExemplars<E>> for Edges {
    fn new_metric(&self) -> HistogramWithExemplars<E> {
        HistogramWithExemplars::new(self.0.iter().copied())
    }
}

/// Raises a counter to a total that is counted elsewhere.
pub fn raise(counter: &prometheus_client::metrics::counter::Counter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}
