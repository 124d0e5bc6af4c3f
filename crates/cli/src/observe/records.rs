//! Reads the coordinator's pages about requests into its own types (docs/reference/records.md). Every member may be absent.

use coordinator::records::shape::Serving;
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

/// `prefill-0 > decode-0`, or the one node that did both.
pub fn way(serving: &Serving) -> String {
    match (&serving.prefill_node, &serving.decode_node) {
        (Some(prefill), Some(decode)) if prefill != decode => format!("{prefill} > {decode}"),
        (Some(node), _) | (None, Some(node)) => node.clone(),
        (None, None) => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use coordinator::records::Page;
    use coordinator::records::shape::Waterfall;
    use serde_json::json;

    #[test]
    fn nulls_and_unknown_members_are_no_errors() {
        let page = json!({"records": [{"seq": 1, "breached": null, "news": {"a": null}, "ttft_ms": null}, null], "next_before": null});
        let page: Page = parse(&page).expect("tolerated");
        assert_eq!(page.records.len(), 1);
        assert_eq!((page.records[0].seq, page.records[0].ttft_ms), (1, None));
    }

    #[test]
    fn a_wrong_type_is_an_error_and_no_panic() {
        assert!(parse::<Page>(&json!({"records": 3})).is_err());
        assert!(parse::<Waterfall>(&json!([1, 2])).is_err());
    }
}
