//! Names and addresses that people, certificates and other processes write: what is read is written as the same again.

use std::fmt::{Debug, Display};
use std::str::FromStr;

use etcd_membership::EtcdAddress;
use identity::{CertifiedProcess, PeerName};
use service_runtime::http_guard::WebOrigin;
use service_runtime::membership::CoordinatorsAt;
use service_runtime::units::ByteSize;

pub(crate) fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    same_again::<PeerName>(text);
    same_again::<ByteSize>(text);
    if let Ok(address) = text.parse::<EtcdAddress>() {
        // The password is not shown, so the text of an address is not read again.
        assert!(address.lease_ttl().as_secs() >= 2 && !address.cluster().as_str().is_empty());
    }
    let _ = text.parse::<CertifiedProcess>();
    let _ = text.parse::<WebOrigin>();
    let _ = text.parse::<CoordinatorsAt>();
}

fn same_again<T: FromStr + Display + Debug + PartialEq>(text: &str) {
    if let Ok(read) = text.parse::<T>() {
        let again = read.to_string().parse::<T>().ok();
        assert_eq!(again.as_ref(), Some(&read), "{text:?} becomes {read}");
    }
}
