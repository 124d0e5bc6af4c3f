//! The coordinator's page about requests (docs/reference/records.md). Every member may be absent.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Reads a page. A member that is `null` counts as absent, and an unknown member is skipped.
///
/// # Errors
/// A member has another type than the contract says.
pub fn parse<T: DeserializeOwned>(page: &Value) -> Result<T, serde_json::Error> {
    serde_json::from_value(without_nulls(page))
}

fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(members) => members
            .iter()
            .filter(|(_, member)| !member.is_null())
            .map(|(name, member)| (name.clone(), without_nulls(member)))
            .collect(),
        Value::Array(items) => items.iter().filter(|item| !item.is_null()).map(without_nulls).collect(),
        other => other.clone(),
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct RecordsPage {
    pub records: Vec<Summary>,
    pub kept: u64,
    pub forgotten: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Summary {
    pub seq: u64,
    pub id: String,
    pub trace_id: String,
    pub received_unix_ms: f64,
    pub endpoint: String,
    pub model: String,
    pub lane: String,
    pub is_streaming: bool,
    pub state: String,
    pub outcome: Option<String>,
    pub status: Option<u64>,
    pub error: Option<Value>,
    pub prompt_tokens: Option<u64>,
    pub output_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    pub prefill_node: Option<String>,
    pub decode_node: Option<String>,
    pub route_reason: Option<String>,
    pub local_prefill: Option<String>,
    pub attempts: Option<u64>,
    pub preemptions: Option<u64>,
    pub transport: Option<String>,
    pub kv_bytes: Option<u64>,
    pub kv_transfer_ms: Option<f64>,
    pub queue_ms: Option<f64>,
    pub ttft_ms: Option<f64>,
    pub itl_p50_ms: Option<f64>,
    pub itl_max_ms: Option<f64>,
    pub e2e_ms: Option<f64>,
    pub unattributed_ms: Option<f64>,
    pub stall_count: u64,
    pub slo: Option<String>,
    pub breached: Vec<String>,
    pub slow_because: Option<String>,
    pub stages: Vec<Stage>,
    pub stalls: Vec<Stall>,
    pub failed_legs: Vec<String>,
    /// For a request with several prompts: where each ran.
    pub prompts: Vec<Prompt>,
    pub clocks: Vec<Clock>,
}

impl Summary {
    pub fn is_ended(&self) -> bool {
        self.state == "ended"
    }

    /// `prefill-0 > decode-0`, or the one node that did both.
    pub fn nodes(&self) -> String {
        way((&self.prefill_node, &self.decode_node))
    }

    /// The text of `error`, which may be a sentence or an object with a message.
    pub fn error_words(&self) -> Option<String> {
        match self.error.as_ref()? {
            Value::String(words) => Some(words.clone()),
            Value::Object(error) => match error.get("message") {
                Some(Value::String(words)) => Some(words.clone()),
                _ => Some(Value::Object(error.clone()).to_string()),
            },
            other => Some(other.to_string()),
        }
    }
}

fn way(nodes: (&Option<String>, &Option<String>)) -> String {
    match nodes {
        (Some(prefill), Some(decode)) if prefill != decode => format!("{prefill} > {decode}"),
        (Some(node), _) | (None, Some(node)) => node.clone(),
        (None, None) => "-".to_owned(),
    }
}

/// One of several prompts of a request.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Prompt {
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    pub prefill_node: Option<String>,
    pub decode_node: Option<String>,
    pub attempts: u64,
    pub transport: Option<String>,
    pub kv_bytes: u64,
    pub stages: Vec<Stage>,
}

impl Prompt {
    pub fn nodes(&self) -> String {
        way((&self.prefill_node, &self.decode_node))
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Stage {
    pub stage: String,
    pub phase: String,
    pub ms: f64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Stall {
    pub choice: u64,
    pub token: u64,
    pub at_ms: f64,
    pub gap_ms: f64,
    pub cause: String,
    pub words: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Clock {
    pub node: String,
    pub offset_ms: f64,
    pub error_ms: f64,
}

/// `/admin/traces/{id}?view=waterfall`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Waterfall {
    pub trace_id: String,
    pub request: Summary,
    pub spans: Vec<Span>,
    pub clocks: Vec<Clock>,
    pub not_asked: Vec<NotAsked>,
    pub orphan_count: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Span {
    pub span_id: String,
    pub parent_span_id: Option<String>,
    pub name: String,
    pub process: String,
    pub depth: usize,
    pub start_ms: f64,
    pub end_ms: f64,
    pub events: Vec<SpanEvent>,
    pub error: Option<Value>,
}

impl Span {
    pub fn error_words(&self) -> Option<String> {
        self.error.as_ref().map(|error| match error {
            Value::String(words) => words.clone(),
            other => other.to_string(),
        })
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct SpanEvent {
    pub name: String,
    pub at_ms: f64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct NotAsked {
    pub node: String,
    pub why: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn nulls_and_unknown_members_are_no_errors() {
        let page = json!({"records": [{"seq": 1, "breached": null, "news": {"a": null}, "ttft_ms": null}, null], "next_before": null});
        let page: RecordsPage = parse(&page).expect("tolerated");
        assert_eq!(page.records.len(), 1);
        assert_eq!((page.records[0].seq, page.records[0].ttft_ms), (1, None));
    }

    #[test]
    fn a_wrong_type_is_an_error_and_no_panic() {
        assert!(parse::<RecordsPage>(&json!({"records": 3})).is_err());
        assert!(parse::<Waterfall>(&json!([1, 2])).is_err());
    }
}
