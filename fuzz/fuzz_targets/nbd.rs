#![no_main]

forebay_fuzz::targets! {
    "nbd_certificate" => forebay_nbd::fuzz::certificate,
    "nbd_negotiation" => forebay_nbd::fuzz::negotiation,
    "nbd_request" => forebay_nbd::fuzz::requests,
}
