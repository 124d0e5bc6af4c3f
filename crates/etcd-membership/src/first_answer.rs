//! Whether etcd answers at all: asked before a cluster is started on it, and told while a process waits for it.

use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

use crate::address::EtcdAddress;
use crate::back_off::BackOff;
use crate::connection::Connection;
use crate::entry::{Entry as _, NodeEntry};
use crate::registration_health::RegistrationHealth;
use crate::trouble::EtcdTrouble;

/// An etcd that works answers within milliseconds. One second leaves time to ask another endpoint.
const CALL_LIMIT: Duration = Duration::from_secs(1);
/// etcd may start a moment after its users.
const FIRST_WORD_AFTER: Duration = Duration::from_secs(2);
const WORD_EVERY: Duration = Duration::from_secs(30);

/// Asks one endpoint after the other until one answers.
///
/// # Errors
/// The last trouble, after `within`, or at once when a person must mend it.
pub async fn first_answer(address: &EtcdAddress, within: Duration) -> Result<(), EtcdTrouble> {
    let deadline = Instant::now() + within;
    let (mut back_off, mut endpoint_index, mut last) = (BackOff::new(), 0_usize, EtcdTrouble::NotYet);
    loop {
        last = match timeout_at(deadline, ask(address, endpoint_index)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(trouble)) if trouble.is_for_a_person() => return Err(trouble),
            Ok(Err(trouble)) => trouble,
            Err(_) => return Err(last),
        };
        endpoint_index = endpoint_index.wrapping_add(1);
        // A pause that would end later ends with the wait.
        let _ = timeout_at(deadline, tokio::time::sleep(back_off.pause())).await;
    }
}

async fn ask(address: &EtcdAddress, endpoint_index: usize) -> Result<(), EtcdTrouble> {
    let etcd = Connection::open(address, endpoint_index, CALL_LIMIT).await?;
    etcd.list(&address.prefix(NodeEntry::FOLDER), 1).await.map(|_| ())
}

/// Says now and then that etcd has not registered the process since its start. It says nothing about later outages.
pub(crate) async fn say_unanswered(etcd: String, mut health: watch::Receiver<RegistrationHealth>) -> Infallible {
    let started = Instant::now();
    let mut next_word = FIRST_WORD_AFTER;
    loop {
        let is_settled = |health: &RegistrationHealth| !matches!(health, RegistrationHealth::Retrying { .. });
        let has_answered = timeout(next_word, health.wait_for(is_settled)).await.is_ok();
        if has_answered {
            return std::future::pending().await;
        }
        let why = match &*health.borrow() {
            RegistrationHealth::Retrying { why, .. } if !why.is_for_a_person() => why.clone(),
            // It has been told as an error, with what to do.
            RegistrationHealth::Retrying { .. } => {
                next_word = WORD_EVERY;
                continue;
            }
            RegistrationHealth::Registered { .. } | RegistrationHealth::Fenced { .. } => continue,
        };
        tracing::warn!(
            %etcd, waited_s = started.elapsed().as_secs(), %why,
            "etcd has not registered this process since its start; trying on. If etcd does not run, start it; if it does, check \
             its address (`membership` of a coordinator, `coordinators` of a node)"
        );
        next_word = WORD_EVERY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_etcd_that_takes_connections_and_says_nothing_is_given_up_in_time() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("etcd://{}/c", silent.local_addr().expect("bound"));
        let address: EtcdAddress = address.parse().expect("an address");
        let trouble = first_answer(&address, CALL_LIMIT * 3 / 2)
            .await
            .expect_err("nobody answers");
        assert_ne!(trouble, EtcdTrouble::NotYet, "the words say what was tried");
    }

    #[tokio::test]
    async fn what_a_person_must_mend_is_told_at_once() {
        let address: EtcdAddress = "etcds://h:1/c?ca=/nonexistent/ca.pem".parse().expect("an address");
        let trouble = first_answer(&address, Duration::from_secs(3_600)).await;
        assert!(matches!(trouble, Err(EtcdTrouble::TlsFile { .. })), "{trouble:?}");
    }
}
