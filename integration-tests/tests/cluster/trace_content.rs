//! What a request says is in its trace where that was asked for, and what went wrong always.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

use integration_tests::cluster::{TestCluster, options};
use integration_tests::waterfall::{complete, record, whole};
use serde_json::{Value, json};

/// Attributes of the root span, and why the request failed.
fn root(trace: &Value) -> (&Value, &Value) {
    let spans = trace["spans"].as_array().unwrap();
    let root = spans.iter().find(|span| span["parent_span_id"].is_null()).unwrap();
    (&root["attributes"], &root["error"])
}

fn messages(attribute: &Value) -> Value {
    serde_json::from_str(attribute.as_str().unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn prompt_and_answer_are_on_the_root_span_where_content_is_traced() {
    let mut options = options("1p1d").unwrap();
    options.settings.trace_content = true;
    let cluster = TestCluster::start_with(options).await.unwrap();
    let turns = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say \"hi\"."}]);
    let chat = json!({"messages": turns, "max_tokens": 3, "user": "somebody", "stream": true});
    complete(&cluster, "told", chat).await.unwrap();
    let trace = whole(&cluster, "told").await.unwrap();
    let (said, error) = root(&trace);
    let expected = json!([
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [{"type": "text", "content": "Say \"hi\"."}]},
    ]);
    assert_eq!(messages(&said["gen_ai.input.messages"]), expected, "{said}");
    let answer = messages(&said["gen_ai.output.messages"]);
    assert_eq!(
        (&answer[0]["role"], &answer[0]["finish_reason"]),
        (&json!("assistant"), &json!("length"))
    );
    assert!(answer[0]["parts"][0]["content"].is_string(), "{answer}");
    assert_eq!(said["enduser.id"], "somebody", "{said}");
    assert_eq!(said["gen_ai.response.finish_reasons"], json!(["length"]), "{said}");
    assert_eq!(*error, Value::Null);

    // A request that is refused: the words of its error, and no answer.
    let chat = json!({"messages": turns, "max_tokens": 3, "temperature": -1});
    complete(&cluster, "refused", chat).await.unwrap_err();
    record(&cluster, "refused").await.unwrap();
    let url = cluster.url("/admin/traces/refused?view=waterfall");
    let trace: Value = cluster.http.get(url).send().await.unwrap().json().await.unwrap();
    let (said, error) = root(&trace);
    assert_eq!(said["error.type"], "invalid_request", "{said}");
    assert!(
        error.as_str().is_some_and(|words| words.contains("temperature")),
        "{error}"
    );
    assert_eq!(said["gen_ai.output.messages"], Value::Null);
    cluster.stop().await.unwrap();
}
