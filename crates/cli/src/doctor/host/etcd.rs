//! etcd, where one is configured: does it answer, and how fast.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use coordinator::registry::MembershipKind;
use identity::TlsConfig;

use super::finding::{Finding, Group};

/// etcd elects a leader within a second.
pub(super) const ANSWERS_WITHIN: Duration = Duration::from_secs(3);
/// The first answer includes the connection. On a local network it takes a few milliseconds.
const SLOW_FROM: Duration = Duration::from_millis(100);

/// The etcd that nodes of this environment are told of (`BATON_COORDINATORS`).
pub(super) fn of_nodes(environment: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    environment("BATON_COORDINATORS").filter(|address| address.starts_with("etcd"))
}

/// The certificate of the processes of this environment, and whether they may speak plain text to other hosts.
pub(super) fn tls_of(environment: &dyn Fn(&str) -> Option<String>) -> TlsConfig {
    let file = |name| environment(name).map(PathBuf::from);
    TlsConfig {
        tls_cert: file("BATON_TLS_CERT"),
        tls_key: file("BATON_TLS_KEY"),
        tls_ca: file("BATON_TLS_CA"),
        insecure: environment("BATON_INSECURE").as_deref() == Some("true"),
    }
}

pub(super) async fn look(membership: Option<String>, tls: &TlsConfig, within: Duration) -> Finding {
    let none = "none: processes are told each other's addresses (--membership etcds://HOST:PORT/CLUSTER looks at one)";
    let Some(address) = membership else {
        return Group::Etcd.not_configured("etcd", none);
    };
    let kind = match address.parse::<MembershipKind>() {
        Ok(MembershipKind::Embedded) => return Group::Etcd.not_configured("etcd", none),
        Ok(kind) => kind,
        Err(why) => return Group::Etcd.fail("etcd", why, "write --membership etcds://HOST:2379/CLUSTER"),
    };
    let kind = match kind.used_by(tls) {
        Ok(kind) => kind,
        Err(why) => {
            let to_do =
                "set BATON_TLS_CA, BATON_TLS_CERT and BATON_TLS_KEY, or BATON_INSECURE=true, as for the processes";
            return Group::Etcd.fail("etcd", why.to_string(), to_do);
        }
    };
    let asked = Instant::now();
    match kind.first_answer(within).await {
        Ok(()) => of_answer(&kind, asked.elapsed()),
        Err(trouble) => Group::Etcd.fail(
            "etcd",
            format!("{kind} does not answer: {trouble}"),
            "start that etcd, or correct its address; a cluster without one needs --membership embedded",
        ),
    }
}

fn of_answer(kind: &MembershipKind, took: Duration) -> Finding {
    let seen = format!("{kind} answers in {:.1} ms", took.as_secs_f64() * 1e3);
    match took < SLOW_FROM {
        true => Group::Etcd.ok("etcd", seen),
        false => Group::Etcd.warn(
            "etcd",
            seen,
            "look at the disk and the network of etcd: entries of live processes expire when it is slower than their lease",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;

    #[tokio::test]
    async fn no_etcd_is_no_failure_and_one_that_is_not_there_is() {
        let (within, own) = (Duration::from_millis(100), TlsConfig::default());
        for none in [None, Some("embedded")] {
            assert_eq!(
                look(none.map(str::to_owned), &own, within).await.verdict,
                Verdict::NotConfigured
            );
        }
        for wrong in ["etcd:no", "etcd://10.0.0.1:2379/c", "etcds://10.0.0.1:2379/c"] {
            let finding = look(Some(wrong.to_owned()), &own, within).await;
            assert_eq!(finding.verdict, Verdict::Fail, "{wrong}");
            let is_asked = format!("{finding:?}").contains("does not answer");
            assert!(!is_asked, "{finding:?}");
        }
        let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = port.local_addr().expect("bound");
        drop(port);
        let finding = look(Some(format!("etcd://user:secret@{address}/c")), &own, within).await;
        assert_eq!(finding.verdict, Verdict::Fail);
        let words = format!("{finding:?}");
        assert!(
            words.contains(&address.to_string()) && !words.contains("secret"),
            "{words}"
        );
    }

    #[test]
    fn a_slow_answer_is_a_warning() {
        let kind: MembershipKind = "etcd://h:1/c".parse().expect("an address");
        assert_eq!(of_answer(&kind, Duration::from_millis(2)).verdict, Verdict::Ok);
        assert_eq!(of_answer(&kind, Duration::from_millis(300)).verdict, Verdict::Warn);
        let variable = |value: &'static str| move |_: &str| Some(value.to_owned());
        assert_eq!(of_nodes(&variable("etcd://h:1/c")).as_deref(), Some("etcd://h:1/c"));
        assert_eq!(of_nodes(&variable("10.0.0.1:7400")), None);
        assert!(tls_of(&variable("true")).insecure && !tls_of(&variable("false")).insecure);
    }
}
