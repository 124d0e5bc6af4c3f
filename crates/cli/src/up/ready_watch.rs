//! The answer of `/ready` while a cluster runs. Changes are printed, so that nobody learns of them by slow answers.

use std::time::Duration;

use serde_json::Value;
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::http::Client;

/// A person reads the changes. The coordinator counts its own probes.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Asks one coordinator again and again.
#[derive(Debug)]
pub struct ReadyWatch {
    client: Client,
    url: String,
    every: Interval,
    said: String,
}

const READY: &str = "ready";

fn words(answer: &Value) -> String {
    if let Some(error) = answer.get("error").filter(|error| !error.is_null()) {
        return error["message"].as_str().unwrap_or_default().to_owned();
    }
    let unsplit = answer["unsplit_because"].as_str();
    unsplit.map_or_else(|| READY.to_owned(), |because| format!("ready, but unsplit: {because}"))
}

impl ReadyWatch {
    pub fn new(client: Client, base_url: &str) -> Self {
        let mut every = interval(LOOK_EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            client,
            url: format!("{base_url}/ready"),
            every,
            said: READY.to_owned(),
        }
    }

    /// Returns when the words have changed. It says nothing about a coordinator that does not answer: its end is reported
    /// elsewhere.
    pub async fn next_change(&mut self) -> &str {
        loop {
            self.every.tick().await;
            let Some(words) = self.look().await else { continue };
            if words != self.said {
                self.said = words;
                return &self.said;
            }
        }
    }

    async fn look(&self) -> Option<String> {
        let answer = self.client.get(&self.url).timeout(ANSWER_WITHIN).send().await.ok()?;
        Some(words(&answer.json().await.ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::client;
    use crate::observe::test_kit::{Answer as Served, TestServer};

    #[tokio::test]
    async fn only_what_is_new_is_told() {
        let split = Served::json("/ready", r#"{"status": "ready", "unsplit_because": null}"#);
        let unsplit = || {
            Served::json(
                "/ready",
                r#"{"status": "ready", "unsplit_because": "no prefill node is ready"}"#,
            )
        };
        let not_ready = r#"{"error": {"message": "The cluster is not ready: no decode node is ready."}}"#;
        let not_ready = Served::with_status("/ready", "503 Service Unavailable", not_ready);
        let back = Served::json("/ready", "{}");
        let server = TestServer::start(vec![split, unsplit(), unsplit(), not_ready, back]).await;
        let mut watch = ReadyWatch::new(client(&server.url, None).expect("a client"), &server.url);
        watch.every = interval(Duration::from_millis(1));
        assert!(watch.next_change().await.contains("no prefill node"));
        assert!(watch.next_change().await.contains("no decode node"));
        assert_eq!(watch.next_change().await, READY);
        assert_eq!(server.asked().len(), 5);
    }
}
