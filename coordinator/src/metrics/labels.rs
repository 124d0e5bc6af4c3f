//! The label sets of the coordinator's metrics; `service_runtime::metrics::table` says what their values are.

use prometheus_client::encoding::EncodeLabelSet;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OutcomeLabels {
    pub model: String,
    pub lane: &'static str,
    pub outcome: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct LaneLabel {
    pub lane: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StallLabels {
    pub lane: &'static str,
    pub cause: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct SloLabels {
    pub slo: String,
    pub lane: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BreachLabels {
    pub slo: String,
    pub lane: &'static str,
    pub breach: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct KeyRefusalLabel {
    pub reason: &'static str,
}

/// The label of exemplars.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct TraceLabel {
    pub trace_id: String,
}
