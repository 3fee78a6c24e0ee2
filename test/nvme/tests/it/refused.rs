//! Log messages about refused hosts.

use std::collections::BTreeMap;

use crate::common::*;
use forebay_load::log::Lines;
use forebay_nvme_host::client::Client;
use forebay_nvme_host::codec::Digests;
use forebay_nvmf::HostAccess;

const NONE: Digests = Digests { header: false, data: false };

#[test]
fn a_host_that_is_refused_is_one_line() {
    Lines::of(|lines| {
        simulate(2, |seed, site| async move {
            site.subsystem.set_access(HostAccess::Listed(BTreeMap::from([(HOST.to_owned(), None)])));
            let other = "nqn.2014-08.org.nvmexpress:uuid:99999999-2222-4333-8444-555555555555";
            for (host, subsystem, reason) in
                [(OTHER, NQN, "the host is not allowed"), (HOST, other, "invalid subsystem NQN")]
            {
                lines.take("");
                assert!(Client::admin(&addr(), NONE, subsystem, host).await.is_err(), "seed {seed}");
                let found = lines.take("WARN host refused front=nvme ");
                assert!(
                    found.len() == 1
                        && found[0].starts_with(&format!("WARN host refused front=nvme host={host} address="))
                        && found[0].ends_with(&format!(" subsystem={subsystem} reason={reason}")),
                    "seed {seed}: {found:?}"
                );
            }
            until(|| site.subsystems.stats().counts().refused == 2).await;
            Client::admin(&addr(), NONE, NQN, HOST).await.expect("is allowed");
            assert_eq!(lines.take("WARN "), Vec::<String>::new(), "seed {seed}");
        });
    });
}
