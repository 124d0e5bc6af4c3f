//! How the processes of a local cluster find each other.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use coordinator::registry::MembershipKind;

use super::LocalClusterError;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LocalMembership {
    /// Nodes get the coordinators' addresses.
    #[default]
    Embedded,
    /// An etcd is started for the cluster, if one is installed.
    StartEtcd,
    /// A running etcd: its address, in the form that the processes get.
    Etcd(String),
}

impl LocalMembership {
    /// Waits until an etcd that runs already answers. Processes that find none would wait for it in silence.
    /// `kind` is it as the coordinators use it.
    pub(super) async fn first_answer(&self, kind: &MembershipKind, within: Duration) -> Result<(), LocalClusterError> {
        let no_etcd = |why: String| LocalClusterError::NoEtcd {
            membership: self.clone(),
            within,
            why,
        };
        let answered = kind.first_answer(within).await;
        answered.map_err(|trouble| no_etcd(trouble.to_string()))
    }
}

impl FromStr for LocalMembership {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "etcd" {
            return Ok(Self::StartEtcd);
        }
        match text.parse::<MembershipKind>() {
            Ok(MembershipKind::Embedded) => Ok(Self::Embedded),
            Ok(MembershipKind::Etcd(_)) => Ok(Self::Etcd(text.to_owned())),
            Err(why) => Err(format!("{why}, or etcd, which starts one")),
        }
    }
}

impl fmt::Display for LocalMembership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded => f.write_str("embedded"),
            Self::StartEtcd => f.write_str("etcd"),
            Self::Etcd(address) => match address.parse::<MembershipKind>() {
                Ok(kind) => kind.fmt(f),
                Err(_) => f.write_str("etcd"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_ways_and_nothing_else() {
        assert_eq!("embedded".parse(), Ok(LocalMembership::Embedded));
        assert_eq!("etcd".parse(), Ok(LocalMembership::StartEtcd));
        let at = "etcd://u:word@h:2379/c?lease_s=5";
        assert_eq!(at.parse(), Ok(LocalMembership::Etcd(at.to_owned())));
        assert!(!LocalMembership::Etcd(at.to_owned()).to_string().contains("word"));
        let why = "consul".parse::<LocalMembership>().expect_err("unknown");
        assert!(why.contains("embedded") && why.contains("which starts one"), "{why}");
    }
}
