//! The ports that a cluster needs: free, or who has them.

use std::io::ErrorKind;
use std::net::{TcpListener, ToSocketAddrs as _};

use super::finding::{Finding, Group};
use crate::bench::load::processes::{command, listener};

/// Ports that processes take which are started one by one. `baton up` takes any free ones instead.
const OF_SINGLE_PROCESSES: [(&str, &str); 3] = [
    ("control", "127.0.0.1:7400"),
    ("prefill", "127.0.0.1:7410"),
    ("decode", "127.0.0.1:7420"),
];

pub(super) fn look(listen: &str) -> Vec<Finding> {
    let mut findings = vec![of_api(listen)];
    findings.extend(OF_SINGLE_PROCESSES.map(|(check, address)| of_single_process(check, address)));
    findings
}

fn of_api(listen: &str) -> Finding {
    match taken(listen) {
        Ok(None) => Group::Ports.ok("API", format!("{listen} is free")),
        Ok(Some(holder)) if holder.is_baton() => Group::Ports.warn(
            "API",
            format!("{listen} is in use by {holder}: a cluster runs already"),
            "baton status shows it; another one needs another port: baton up --listen 127.0.0.1:0",
        ),
        Ok(Some(holder)) => Group::Ports.fail(
            "API",
            format!("{listen} is in use by {holder}"),
            "end that program, or take another port: baton up --listen 127.0.0.1:0",
        ),
        Err(error) => Group::Ports.fail(
            "API",
            format!("{listen} cannot be listened on: {error}"),
            "write HOST:PORT with an address of this machine, such as 127.0.0.1:8000",
        ),
    }
}

fn of_single_process(check: &'static str, address: &str) -> Finding {
    match taken(address) {
        Ok(None) => Group::Ports.ok(check, format!("{address} is free")),
        Ok(Some(holder)) if holder.is_baton() => Group::Ports.ok(check, format!("{address} has {holder}")),
        Ok(Some(holder)) => Group::Ports.warn(
            check,
            format!("{address} is in use by {holder}"),
            "give `baton serve-*` another port; `baton up` does not need this one",
        ),
        Err(error) => Group::Ports.warn(
            check,
            format!("{address} cannot be listened on: {error}"),
            "give `baton serve-*` another address; `baton up` does not need this one",
        ),
    }
}

/// Who listens on a port. Other users' processes are not told by the system.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Holder(Option<(u32, Vec<String>)>);

impl Holder {
    fn of(address: &str) -> Self {
        let mut addresses = address.to_socket_addrs().into_iter().flatten();
        let pid = addresses.find_map(listener);
        Self(pid.map(|pid| (pid, command(pid).unwrap_or_default())))
    }

    fn is_baton(&self) -> bool {
        let words = self.0.as_ref().map(|(_, words)| words.as_slice()).unwrap_or_default();
        words.get(1).is_some_and(|verb| verb.starts_with("serve-"))
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            // Flags may hold secrets.
            Some((pid, words)) => {
                let words = words.iter().map(String::as_str);
                let shown: Vec<&str> = words.take_while(|word| !word.starts_with('-')).collect();
                write!(f, "pid {pid} ({})", shown.join(" "))
            }
            None => f.write_str("a program of another user"),
        }
    }
}

/// `None`: the address is free.
fn taken(address: &str) -> std::io::Result<Option<Holder>> {
    match TcpListener::bind(address) {
        Ok(_) => Ok(None),
        Err(error) if error.kind() == ErrorKind::AddrInUse => Ok(Some(Holder::of(address))),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;

    #[test]
    fn a_port_in_use_names_its_process_and_a_word_that_is_no_address_fails() {
        let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = socket.local_addr().expect("bound").to_string();
        let finding = of_api(&address);
        assert_eq!(finding.verdict, Verdict::Fail, "{finding:?}");
        assert!(
            finding.seen.contains(&format!("pid {}", std::process::id())),
            "{finding:?}"
        );
        assert_eq!(of_single_process("decode", &address).verdict, Verdict::Warn);
        drop(socket);
        assert_eq!(of_api(&address).verdict, Verdict::Ok);
        assert_eq!(of_api("nowhere").verdict, Verdict::Fail);
    }

    #[test]
    fn a_cluster_that_runs_already_is_no_failure_and_flags_are_not_shown() {
        let words = ["/usr/bin/baton", "serve-coordinator", "--slo=x"]
            .map(str::to_owned)
            .to_vec();
        let holder = Holder(Some((7, words)));
        assert!(holder.is_baton());
        assert_eq!(holder.to_string(), "pid 7 (/usr/bin/baton serve-coordinator)");
        assert!(!Holder(None).is_baton());
    }
}
