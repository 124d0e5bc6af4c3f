//! The name of a process in its certificate.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A name in a certificate is a line of text. A longer one is nobody's.
const NAME_BYTES_MAX: usize = 512;

/// What a process does in its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum PeerRole {
    Coordinator,
    Prefill,
    Decode,
    /// A person or a program that looks at nodes: `/metrics` and `/admin` of a node.
    Operator,
}

impl PeerRole {
    pub const ALL: [Self; 4] = [Self::Coordinator, Self::Prefill, Self::Decode, Self::Operator];

    pub fn name(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinator",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Operator => "operator",
        }
    }
}

impl fmt::Display for PeerRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `spiffe://CLUSTER/ROLE/NAME`. A node that may change its role has a certificate with a name for each role.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PeerName {
    pub cluster: String,
    pub role: PeerRole,
    pub name: String,
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "spiffe://{}/{}/{}", self.cluster, self.role, self.name)
    }
}

#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("not of the form spiffe://CLUSTER/ROLE/NAME with a role of coordinator, prefill, decode and operator")]
pub struct NotAName;

impl FromStr for PeerName {
    type Err = NotAName;

    fn from_str(text: &str) -> Result<Self, NotAName> {
        if text.len() > NAME_BYTES_MAX {
            return Err(NotAName);
        }
        let rest = text.strip_prefix("spiffe://").ok_or(NotAName)?;
        let mut parts = rest.split('/');
        let (cluster, role, name) = (parts.next(), parts.next(), parts.next());
        let (Some(cluster), Some(role), Some(name), None) = (cluster, role, name, parts.next()) else {
            return Err(NotAName);
        };
        let role = PeerRole::ALL.into_iter().find(|known| known.name() == role);
        match role {
            Some(role) if is_word(cluster) && is_word(name) => Ok(Self {
                cluster: cluster.to_owned(),
                role,
                name: name.to_owned(),
            }),
            _ => Err(NotAName),
        }
    }
}

/// The characters of a node's name and of a cluster's. None of them has a meaning in a URI.
pub(crate) fn is_word(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !text.is_empty() && text.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_is_written() {
        for role in PeerRole::ALL {
            let text = format!("spiffe://demo/{role}/node-0.b_1");
            assert_eq!(text.parse::<PeerName>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_has_another_form_names_nobody() {
        let long = format!("spiffe://demo/decode/{}", "x".repeat(600));
        for text in [
            "",
            "demo/decode/x",
            "spiffe://demo/decode",
            "spiffe://demo/decode/",
            "spiffe:///decode/x",
            "spiffe://demo/Decode/x",
            "spiffe://demo/decode/x/y",
            "spiffe://demo/decode/x?y",
            "spiffe://demo@evil/decode/x",
            "spiffe://demo/root/x",
            "SPIFFE://demo/decode/x",
            " spiffe://demo/decode/x",
            long.as_str(),
        ] {
            assert_eq!(text.parse::<PeerName>(), Err(NotAName), "{text}");
        }
    }
}
