//! Negotiation of operational parameters in a login (RFC 7143, chapter 13).

use super::text::{self, Pair};

/// Range of MaxRecvDataSegmentLength that the protocol allows, in bytes.
const SEGMENT: std::ops::RangeInclusive<u32> = 512..=0xff_ffff;

/// Parameter values that the target offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// Maximum data segment that is received, in bytes.
    pub receive_max: u32,
    /// Maximum burst length in bytes.
    pub burst_max: u32,
    /// Maximum unsolicited data of a command, in bytes (FirstBurstLength).
    pub first_burst: u32,
    /// Maximum number of outstanding R2Ts per task.
    pub r2t_max: u16,
    /// Digests are required.
    pub digests: bool,
}

impl Default for Offer {
    fn default() -> Self {
        Self { receive_max: 256 * 1024, burst_max: 1 << 20, first_burst: 64 * 1024, r2t_max: 8, digests: false }
    }
}

/// Negotiated parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Params {
    /// Headers carry a CRC32C.
    pub header_digest: bool,
    /// Data segments carry a CRC32C.
    pub data_digest: bool,
    /// Maximum data segment that the initiator accepts, in bytes.
    pub send_max: u32,
    /// Maximum data segment that is received, in bytes.
    pub receive_max: u32,
    /// Maximum burst length in bytes.
    pub burst_max: u32,
    /// Maximum unsolicited data of a command, in bytes (FirstBurstLength); at most `burst_max`.
    pub first_burst: u32,
    /// InitialR2T: data-out has to be solicited, except immediate data.
    pub initial_r2t: bool,
    /// Immediate data is allowed.
    pub immediate_data: bool,
    /// Maximum number of outstanding R2Ts per task.
    pub r2t_max: u16,
    /// Minimum time in seconds before the initiator reconnects.
    pub time2wait: u16,
    /// Maximum time in seconds for which tasks could be reassigned after a connection loss; always negotiated to 0.
    pub time2retain: u16,
}

impl Default for Params {
    /// Returns the protocol defaults of keys that are not negotiated.
    fn default() -> Self {
        Self {
            header_digest: false,
            data_digest: false,
            send_max: 8192,
            receive_max: 8192,
            burst_max: 262_144,
            first_burst: 65_536,
            initial_r2t: true,
            immediate_data: true,
            r2t_max: 1,
            time2wait: 2,
            time2retain: 20,
        }
    }
}

/// Parameter value that makes the login fail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid value {key}={value}")]
pub struct BadValue {
    /// Parameter key.
    pub key: String,
    /// Offered value.
    pub value: String,
}

/// Parameter negotiation of a login.
#[derive(Debug, Clone)]
pub struct Negotiator {
    offer: Offer,
    params: Params,
    discovery: bool,
    declared: bool,
}

impl Negotiator {
    /// Creates a negotiation without results yet.
    pub fn new(offer: Offer) -> Self {
        Self { offer, params: Params::default(), discovery: false, declared: false }
    }

    /// Marks the session as a discovery session.
    pub fn set_discovery(&mut self) {
        self.discovery = true;
    }

    /// Negotiates one pair and appends the response to `out`. Returns false for keys that are not negotiated here.
    ///
    /// # Errors
    /// When the value is invalid for its key.
    pub fn answer(&mut self, pair: Pair<'_>, out: &mut Vec<u8>) -> Result<bool, BadValue> {
        let Pair { key, value } = pair;
        let bad = || BadValue { key: key.into(), value: value.chars().take(64).collect() };
        let number = |range: std::ops::RangeInclusive<u32>| {
            text::number(value).filter(|number| range.contains(number)).ok_or_else(bad)
        };
        let yes = || match value {
            "Yes" => Ok(true),
            "No" => Ok(false),
            _ => Err(bad()),
        };
        let said = |yes: bool| if yes { "Yes" } else { "No" };
        let (offer, params) = (self.offer, &mut self.params);
        // Parameters of SCSI commands are irrelevant in discovery sessions.
        let scsi = matches!(
            key,
            "MaxConnections"
                | "InitialR2T"
                | "ImmediateData"
                | "MaxBurstLength"
                | "FirstBurstLength"
                | "MaxOutstandingR2T"
                | "DataPDUInOrder"
                | "DataSequenceInOrder"
                | "TaskReporting"
        );
        if scsi && self.discovery {
            text::push(out, key, "Irrelevant");
            return Ok(true);
        }
        match key {
            "HeaderDigest" | "DataDigest" => {
                // The first acceptable value is chosen: the list is in the initiator's order of preference.
                let mut offered = value.split(',');
                let chosen = match offer.digests {
                    true => offered.find(|&name| name == "CRC32C"),
                    false => offered.find(|name| matches!(*name, "CRC32C" | "None")),
                };
                let chosen = chosen.ok_or_else(bad)?;
                let on = chosen == "CRC32C";
                match key {
                    "HeaderDigest" => params.header_digest = on,
                    _ => params.data_digest = on,
                }
                text::push(out, key, chosen);
            }
            "MaxConnections" => {
                number(1..=65_535)?;
                text::push(out, key, "1");
            }
            "InitialR2T" => {
                params.initial_r2t = yes()?;
                text::push(out, key, said(params.initial_r2t));
            }
            "ImmediateData" => {
                params.immediate_data = yes()?;
                text::push(out, key, said(params.immediate_data));
            }
            "MaxRecvDataSegmentLength" => {
                params.send_max = number(SEGMENT)?;
                self.declare(out);
            }
            "MaxBurstLength" => {
                params.burst_max = number(SEGMENT)?.min(offer.burst_max);
                text::push(out, key, &params.burst_max.to_string());
            }
            "FirstBurstLength" => {
                params.first_burst = number(SEGMENT)?.min(offer.first_burst);
                text::push(out, key, &params.first_burst.to_string());
            }
            "DefaultTime2Wait" => {
                params.time2wait = number(0..=3600)? as u16;
                text::push(out, key, &params.time2wait.to_string());
            }
            "DefaultTime2Retain" => {
                number(0..=3600)?;
                params.time2retain = 0;
                text::push(out, key, "0");
            }
            "MaxOutstandingR2T" => {
                params.r2t_max = (number(1..=65_535)? as u16).min(offer.r2t_max);
                text::push(out, key, &params.r2t_max.to_string());
            }
            "DataPDUInOrder" | "DataSequenceInOrder" => {
                yes()?;
                text::push(out, key, "Yes");
            }
            "ErrorRecoveryLevel" => {
                number(0..=2)?;
                text::push(out, key, "0");
            }
            "iSCSIProtocolLevel" => {
                let level = number(0..=31)?.min(1);
                text::push(out, key, &level.to_string());
            }
            "TaskReporting" => {
                let known = value.split(',').any(|name| name == "RFC3720");
                text::push(out, key, if known { "RFC3720" } else { "Reject" });
            }
            // RFC 7143 removed markers, which were never of use with TCP.
            "OFMarker" | "IFMarker" | "RDMAExtensions" => text::push(out, key, "No"),
            "OFMarkInt" | "IFMarkInt" => text::push(out, key, "Irrelevant"),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Declares MaxRecvDataSegmentLength of this target, once.
    pub fn declare(&mut self, out: &mut Vec<u8>) {
        if !std::mem::replace(&mut self.declared, true) {
            self.params.receive_max = self.offer.receive_max;
            text::push(out, "MaxRecvDataSegmentLength", &self.offer.receive_max.to_string());
        }
    }

    /// Returns true if digests are required but were not negotiated.
    pub fn lacks_digests(&self) -> bool {
        self.offer.digests && !(self.params.header_digest && self.params.data_digest)
    }

    /// Returns the negotiated parameters.
    pub fn finish(&self) -> Params {
        let mut params = self.params;
        params.first_burst = params.first_burst.min(params.burst_max);
        if !self.declared {
            // MaxRecvDataSegmentLength was not declared, so the initiator uses the default.
            params.receive_max = Params::default().receive_max;
        }
        params
    }
}

/// Negotiates a pair in full feature phase. Returns false for keys that cannot change then.
pub fn renegotiate(params: &mut Params, pair: Pair<'_>, out: &mut Vec<u8>) -> bool {
    match pair.key {
        "MaxRecvDataSegmentLength" => {
            match text::number(pair.value).filter(|len| SEGMENT.contains(len)) {
                Some(len) => params.send_max = len,
                None => text::push(out, pair.key, "Reject"),
            }
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn negotiate(pairs: &[(&str, &str)]) -> (Params, String) {
        let mut negotiator = Negotiator::new(Offer::default());
        let mut out = Vec::new();
        for &(key, value) in pairs {
            assert_eq!(negotiator.answer(Pair { key, value }, &mut out), Ok(true), "{key}");
        }
        (negotiator.finish(), String::from_utf8(out).expect("text").replace('\0', " "))
    }

    #[test]
    fn what_open_iscsi_offers_is_agreed_on() {
        let (params, said) = negotiate(&[
            ("HeaderDigest", "CRC32C,None"),
            ("DataDigest", "None"),
            ("DefaultTime2Wait", "2"),
            ("DefaultTime2Retain", "0"),
            ("IFMarker", "No"),
            ("OFMarker", "No"),
            ("ErrorRecoveryLevel", "0"),
            ("InitialR2T", "No"),
            ("ImmediateData", "Yes"),
            ("MaxBurstLength", "16776192"),
            ("FirstBurstLength", "262144"),
            ("MaxOutstandingR2T", "1"),
            ("MaxConnections", "1"),
            ("DataPDUInOrder", "Yes"),
            ("DataSequenceInOrder", "Yes"),
            ("MaxRecvDataSegmentLength", "262144"),
        ]);
        let offer = Offer::default();
        assert!(params.header_digest && !params.data_digest && !params.initial_r2t && params.immediate_data);
        assert_eq!((params.burst_max, params.first_burst), (offer.burst_max, offer.first_burst));
        assert_eq!((params.send_max, params.receive_max, params.r2t_max), (262_144, offer.receive_max, 1));
        assert!(said.contains("HeaderDigest=CRC32C ") && said.contains("MaxRecvDataSegmentLength=262144 "), "{said}");
    }

    #[test]
    fn what_is_not_said_has_its_default() {
        assert_eq!(negotiate(&[]).0, Params { first_burst: 65_536, ..Params::default() });
        let (params, _) = negotiate(&[("MaxBurstLength", "1024")]);
        assert_eq!(params.first_burst, 1024, "never longer than a burst");
    }

    #[test]
    fn nonsense_is_refused() {
        let mut negotiator = Negotiator::new(Offer { digests: true, ..Offer::default() });
        for (key, value) in [
            ("MaxBurstLength", "511"),
            ("MaxBurstLength", "16777216"),
            ("InitialR2T", "Maybe"),
            ("HeaderDigest", "None"),
            ("ErrorRecoveryLevel", "3"),
        ] {
            assert!(negotiator.answer(Pair { key, value }, &mut Vec::new()).is_err(), "{key}={value}");
        }
        assert_eq!(negotiator.answer(Pair { key: "X-com.example", value: "1" }, &mut Vec::new()), Ok(false));
        assert!(negotiator.lacks_digests());
    }
}
