//! Addresses that are taken, addresses that are refused, and that a password shows nowhere.

use proptest::prelude::*;

use super::*;

fn parse(text: &str) -> Result<EtcdAddress, AddressError> {
    text.parse()
}

#[test]
fn a_full_address_is_read() {
    let address = parse("etcds://root:p%40ss%2Fw@etcd-0:2379,[::1]:2380/prod-1?ca=/etc/ca.pem&cert=c&key=k%20y")
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(address.endpoints, ["etcd-0:2379", "[::1]:2380"]);
    assert_eq!(address.cluster().as_str(), "prod-1");
    let credentials = address.credentials.clone().expect("credentials");
    assert_eq!(
        (credentials.user.as_str(), credentials.password.as_str()),
        ("root", "p@ss/w")
    );
    let tls = address.tls.clone().expect("tls");
    assert_eq!(tls.ca, Some(PathBuf::from("/etc/ca.pem")));
    assert_eq!(tls.identity.expect("identity").key, PathBuf::from("k y"));
    assert_eq!(address.endpoint_url(3), "https://[::1]:2380");
    assert_eq!(address.prefix("nodes"), "/baton/prod-1/nodes/");
    for shown in [format!("{address}"), format!("{address:?}")] {
        assert!(
            !shown.contains("p@ss") && !shown.contains("p%40ss") && shown.contains("root:***@"),
            "{shown}"
        );
    }
}

#[test]
fn what_is_wrong_has_a_type() {
    let long = format!("etcd://h:1/{}", "a".repeat(64));
    let many = format!("etcd://{}/c", vec!["h:1"; 17].join(","));
    let cases = [
        ("http://h:1/c", AddressError::Scheme),
        ("etcd://h:1", AddressError::NoCluster),
        ("etcd://h:1/", AddressError::NoCluster),
        ("etcd://h:1/C", AddressError::Cluster("C".into())),
        ("etcd://h:1/a/b", AddressError::Cluster("a/b".into())),
        (&long, AddressError::Cluster("a".repeat(64))),
        ("etcd:///c", AddressError::Endpoint("".into())),
        ("etcd://h/c", AddressError::Endpoint("h".into())),
        ("etcd://h:0/c", AddressError::Endpoint("h:0".into())),
        ("etcd://h:65536/c", AddressError::Endpoint("h:65536".into())),
        ("etcd://::1:2379/c", AddressError::Endpoint("::1:2379".into())),
        ("etcd://h:1,/c", AddressError::Endpoint("".into())),
        (&many, AddressError::TooManyEndpoints),
        ("etcd://user@h:1/c", AddressError::Credentials),
        ("etcd://user:@h:1/c", AddressError::Credentials),
        ("etcd://u:a:b@h:1/c", AddressError::Credentials),
        ("etcd://u:a@b@h:1/c", AddressError::Credentials),
        ("etcd://u:%4@h:1/c", AddressError::Credentials),
        ("etcd://h:1/c?ca=x", AddressError::TlsWithoutScheme),
        ("etcds://h:1/c?ca=x&cert=y", AddressError::HalfIdentity),
        ("etcds://h:1/c?ca=x&ca=y", AddressError::Query("ca".into())),
        (
            "etcds://h:1/c?ca=x&password=secret",
            AddressError::Query("password".into()),
        ),
    ];
    for (text, error) in cases {
        assert_eq!(parse(text), Err(error), "{text}");
    }
}

#[test]
fn plain_text_is_for_this_host_or_for_those_who_say_so() {
    let used = |text: &str, insecure| {
        let process = OfProcess {
            insecure,
            ..OfProcess::default()
        };
        parse(text).expect("an address").used_by(process).map(|_| ())
    };
    for here in ["127.0.0.1:1", "localhost:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
        assert_eq!(used(&format!("etcd://{here}/c"), false), Ok(()), "{here}");
    }
    for elsewhere in ["10.0.0.1:1", "etcd:2379", "[fd00::1]:1", "127.0.0.1.example.com:1"] {
        let refused = Err(AddressError::PlainText(elsewhere.to_owned()));
        assert_eq!(used(&format!("etcd://{elsewhere}/c"), false), refused);
        assert_eq!(used(&format!("etcd://{elsewhere}/c"), true), Ok(()));
        let mixed = format!("etcd://u:hunter2@127.0.0.1:1,{elsewhere}/c");
        assert_eq!(used(&mixed, false), refused, "one member of several is elsewhere");
    }
}

#[test]
fn a_process_uses_its_own_files_where_the_address_names_none() {
    let (ca, certificate, key) = (Path::new("own-ca"), Path::new("own.crt"), Path::new("own.key"));
    let process = OfProcess {
        ca: Some(ca),
        identity: Some((certificate, key)),
        insecure: false,
    };
    let files = |text: &str, process| {
        let used = parse(text).expect("an address").used_by(process)?;
        let tls = used.tls.expect("etcds");
        Ok((
            tls.ca,
            tls.identity.map(|identity| (identity.certificate, identity.key)),
        ))
    };
    let own = Some((certificate.to_owned(), key.to_owned()));
    assert_eq!(files("etcds://h:1/c", process), Ok((Some(ca.to_owned()), own)));
    // An etcd of another authority is not shown the certificate of this cluster.
    assert_eq!(
        files("etcds://h:1/c?ca=x", process),
        Ok((Some(PathBuf::from("x")), None))
    );
    let given = Some((PathBuf::from("y"), PathBuf::from("z")));
    assert_eq!(
        files("etcds://h:1/c?cert=y&key=z", process),
        Ok((Some(ca.to_owned()), given))
    );
    assert_eq!(files("etcds://h:1/c", OfProcess::default()), Err(AddressError::NoCa));
}

#[test]
fn an_error_does_not_show_the_password() {
    let texts = [
        "etcd://u:hunter2@h/c",
        "etcd://u:hunter2@h:1/C",
        "etcd://u:hunter2%4@h:1/c",
        "etc://u:hunter2@h:1/c",
        "etcd://u:hunter2/x@h:1/c",
        "etcd://u:hunter2?x@h:1/c",
        "etcd://u:1/x?hunter2=@h:1/c",
    ];
    for text in texts {
        let error = parse(text).expect_err("refused");
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    }
}

proptest! {
    #[test]
    fn what_is_shown_is_read_again(host in "[a-z][a-z0-9-]{0,10}", port in 1u16.., cluster in "[a-z0-9-]{1,63}") {
        let text = format!("etcd://{host}:{port}/{cluster}");
        prop_assert_eq!(parse(&text).map(|address| address.to_string()), Ok(text));
    }
}
