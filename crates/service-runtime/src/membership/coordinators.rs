//! Where a node's coordinators are: a list of addresses, or the coordinators that are registered in etcd.

use std::fmt;
use std::str::FromStr;

use etcd_membership::{AddressError, EtcdAddress, OfProcess};
use identity::TlsConfig;
use serde::{Serialize, Serializer};
use thiserror::Error;

/// A value of the key `coordinators`: `host:port[,host:port...]`, or an etcd address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CoordinatorsAt {
    /// host:port of each membership service.
    Fixed(Vec<String>),
    Etcd(EtcdAddress),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("`coordinators` is either a list of addresses or one etcd address, not both")]
pub struct MixedCoordinators;

/// What is wrong with one value.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CoordinatorsError {
    #[error(transparent)]
    Etcd(#[from] AddressError),
    #[error("`{0}` is not host:port; write for example 10.0.0.1:7400, or etcds://10.0.0.1:2379/CLUSTER")]
    Address(String),
}

impl CoordinatorsAt {
    /// Joins what was given in several values, such as a list in a file.
    ///
    /// # Errors
    /// Addresses together with etcd, or two etcd addresses.
    pub fn of(given: &[CoordinatorsAt]) -> Result<CoordinatorsAt, MixedCoordinators> {
        if let [one] = given {
            return Ok(one.clone());
        }
        let mut all = Vec::new();
        for value in given {
            match value {
                CoordinatorsAt::Fixed(addresses) => all.extend(addresses.iter().cloned()),
                CoordinatorsAt::Etcd(_) => return Err(MixedCoordinators),
            }
        }
        Ok(CoordinatorsAt::Fixed(all))
    }

    /// As a process with these settings asks them.
    ///
    /// # Errors
    /// It may not ask that etcd in plain text, or has no authority for it.
    pub fn used_by(self, tls: &TlsConfig) -> Result<Self, AddressError> {
        Ok(match self {
            Self::Etcd(address) => Self::Etcd(address.used_by(of_process(tls))?),
            fixed => fixed,
        })
    }
}

/// What a process with these settings has and allows when it asks etcd.
pub fn of_process(tls: &TlsConfig) -> OfProcess<'_> {
    OfProcess {
        ca: tls.tls_ca.as_deref(),
        identity: tls.tls_cert.as_deref().zip(tls.tls_key.as_deref()),
        insecure: tls.insecure,
    }
}

impl FromStr for CoordinatorsAt {
    type Err = CoordinatorsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.contains("://") {
            return Ok(CoordinatorsAt::Etcd(text.parse()?));
        }
        let addresses = text.split(',').map(|address| {
            let (host, port) = address.rsplit_once(':').unwrap_or_default();
            match !host.is_empty() && port.parse::<u16>().is_ok() {
                true => Ok(address.to_owned()),
                false => Err(CoordinatorsError::Address(address.to_owned())),
            }
        });
        Ok(CoordinatorsAt::Fixed(addresses.collect::<Result<_, _>>()?))
    }
}

/// Never shows a password.
impl fmt::Display for CoordinatorsAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CoordinatorsAt::Fixed(addresses) => f.write_str(&addresses.join(",")),
            CoordinatorsAt::Etcd(address) => address.fmt(f),
        }
    }
}

impl Serialize for CoordinatorsAt {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_and_an_etcd_address_are_told_apart() {
        let parse = |text: &str| text.parse::<CoordinatorsAt>();
        let fixed = |list: &[&str]| CoordinatorsAt::Fixed(list.iter().map(|a| (*a).to_owned()).collect());
        assert_eq!(parse("a:1,b:2"), Ok(fixed(&["a:1", "b:2"])));
        let etcd = parse("etcd://user:word@a:1,b:2/prod").expect("an etcd address");
        assert_eq!(etcd.to_string(), "etcd://user:***@a:1,b:2/prod");
        for bad in ["", "a", "a:", ":1", "a:1,", "a:99999", "http://a:1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        let one = parse("a:1").expect("a list");
        let two = parse("b:2").expect("a list");
        assert_eq!(CoordinatorsAt::of(&[one.clone(), two]), Ok(fixed(&["a:1", "b:2"])));
        assert_eq!(CoordinatorsAt::of(std::slice::from_ref(&etcd)), Ok(etcd.clone()));
        assert_eq!(CoordinatorsAt::of(&[one, etcd]), Err(MixedCoordinators));
    }
}
