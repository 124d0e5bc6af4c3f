//! Waiting for a condition with a deadline: what tests do instead of sleeping.

use std::fmt::Debug;
use std::future::Future;
use std::time::{Duration, Instant};

/// How often a condition is looked at. Short against every bound a test asserts (the tightest is 8 ms of TTFT, and that
/// is measured, not polled), long enough to leave the two cores of a CI machine to the cluster.
const POLL_EVERY: Duration = Duration::from_millis(10);

/// Polls `condition` until it yields `Ok`, at most for `within`. The error names `what` and the last reason, so that a
/// failed test says how far things had come.
pub async fn wait_until<T, E, F, Fut>(what: &str, within: Duration, mut condition: F) -> anyhow::Result<T>
where
    E: Debug,
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, E>>,
{
    let started = Instant::now();
    loop {
        let left = within.saturating_sub(started.elapsed());
        let reason = match tokio::time::timeout(left.max(POLL_EVERY), condition()).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(reason)) => format!("{reason:?}"),
            Err(_) => "the condition itself did not answer in time".to_owned(),
        };
        if started.elapsed() >= within {
            anyhow::bail!("not within {within:?}: {what}; last seen: {reason}");
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_condition_that_turns_true_ends_the_wait() {
        let mut seen = 0;
        let value = wait_until("three looks", Duration::from_secs(5), || {
            seen += 1;
            std::future::ready(if seen == 3 { Ok(seen) } else { Err(seen) })
        })
        .await;
        assert_eq!(value.expect("it turned true"), 3);
    }

    #[tokio::test]
    async fn the_deadline_names_what_was_waited_for_and_the_last_reason() {
        let error = wait_until("pigs to fly", Duration::from_millis(30), || {
            std::future::ready(Err::<(), _>("still walking"))
        })
        .await
        .expect_err("they do not");
        let text = error.to_string();
        assert!(text.contains("pigs to fly") && text.contains("still walking"), "{text}");
    }

    #[tokio::test]
    async fn a_condition_that_hangs_does_not_hang_the_wait() {
        let waited = wait_until(
            "an answer",
            Duration::from_millis(30),
            std::future::pending::<Result<(), ()>>,
        )
        .await;
        assert!(waited.is_err());
    }
}
